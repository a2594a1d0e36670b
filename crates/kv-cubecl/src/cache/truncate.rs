//! Truncating a sequence to its first tokens.

use core::ops::Range;

use burn::tensor::Tensor;

use super::{KvCache, slots::check_sequence, state::State};
use crate::{
    Result,
    error::invalid,
    functions::store,
    layout::{Side, SideLayout},
};

impl KvCache {
    /// Forgets all tokens of one sequence but the first `len`: speculative decoding takes back the
    /// tokens that were drafted and not accepted.
    ///
    /// Keys that are quantized in groups of tokens cannot be in float again, so a sequence goes
    /// back no further than [`shortest`](Self::shortest). Values, and keys in other formats, are
    /// quantized one by one, and those that have been since `len` remain what they were restored
    /// to: that form, rounded to the float type, is written back into the float rows where a
    /// sequence of `len` tokens has them (after the Hadamard transform, if any). The state is
    /// again what a cache holds after `len` tokens, if these had those rows from the start. When
    /// they leave the residual again they are quantized again, which gives the codes they had: the
    /// numbers that a group of codes stands for have the group's minimum and, where it has its
    /// greatest code, its scale. Only groups far from 0 for their range, by more than 1500 steps of
    /// their codes, and of rows of 16 bits, whose rounding may move a scale by its last bit, are
    /// quantized from what was written back as any other number is. Where scales are powers of two,
    /// a block may get the next one, and other codes for the same numbers.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) for a sequence that the batch does not
    /// have, and for a `len` above its tokens or below the shortest; nothing is then written.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<()> {
        let shortest = self.shortest(sequence)?;
        let now = self.lens[sequence];
        if len > now {
            let rule = format!("must be at most the {now} tokens of sequence {sequence}");
            return Err(invalid("len", len, rule));
        }
        if len < shortest {
            let why = match len < self.shortest_by_keys(now) {
                true => "keys of the tokens before are quantized",
                false => "its window has left tokens that would be seen",
            };
            let rule = format!(
                "must be at least {shortest} for sequence {sequence} of {now} tokens: {why}"
            );
            return Err(invalid("len", len, rule));
        }
        Side::BOTH.into_iter().for_each(|side| self.restore_rows(side, sequence, len));
        self.lens[sequence] = len;
        Ok(())
    }

    /// Returns the smallest length that [`truncate`](Self::truncate) accepts: the length at which
    /// the sequence's last group of keys was quantized, 0 if there is none, or all tokens if the
    /// sliding window has hidden some.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) for a sequence that the batch does not
    /// have.
    pub fn shortest(&self, sequence: usize) -> Result<usize> {
        check_sequence(sequence, self.lens.len())?;
        let now = self.lens[sequence];
        Ok(self.shortest_by_keys(now).max(self.shortest_by_window(now)))
    }

    /// Truncates a sequence to its first `len` tokens, or to as many of them as leave exactly the
    /// cache that was never given the others, and returns how many these are:
    /// [`exact`](Self::exact).
    ///
    /// # Errors
    /// Those of [`exact`](Self::exact).
    pub fn cut_back(&mut self, sequence: usize, len: usize) -> Result<usize> {
        let exact = self.exact(sequence, len)?;
        self.lens[sequence] = exact;
        Ok(exact)
    }

    /// The largest number of tokens up to `len` at which [`cut_back`](Self::cut_back) leaves the
    /// cache of a sequence that never was longer, bit for bit.
    ///
    /// That is `len` itself where both sides are in float, or quantized as soon as they are
    /// appended, and where no token was quantized since. Keys that are quantized in blocks are
    /// whole at the end of each block. All other rows that were in float at `len` and are not now
    /// are lost, so that only the sinks remain, as they do where a window has hidden tokens. What
    /// is lost has to be computed again; [`truncate`](Self::truncate) restores it from its codes.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) for a sequence that the batch does not
    /// have, and for a `len` above its tokens.
    pub fn exact(&self, sequence: usize, len: usize) -> Result<usize> {
        check_sequence(sequence, self.lens.len())?;
        let now = self.lens[sequence];
        if len > now {
            let rule = format!("must be at most the {now} tokens of sequence {sequence}");
            return Err(invalid("len", len, rule));
        }
        let schedule = self.layout.schedule();
        if len < now && schedule.begin(now) > schedule.sink_tokens {
            return Ok(len.min(schedule.sink_tokens));
        }
        let mut exact = len;
        loop {
            let shorter = Side::BOTH.into_iter().fold(exact, |len, side| {
                if self.layout.sides()[side].spec.is_none() {
                    return len;
                }
                schedule.exact(side, now, len)
            });
            if shorter == exact {
                return Ok(exact);
            }
            exact = shorter;
        }
    }

    /// Returns the smallest length with as many quantized keys as `now` tokens have.
    fn shortest_by_keys(&self, now: usize) -> usize {
        let schedule = self.layout.schedule();
        let in_groups = self.layout.sides().keys.spec.is_some_and(|spec| spec.block_tokens() > 1);
        match schedule.counts(now).keys {
            keys if keys == 0 || !in_groups => 0,
            keys => schedule.sink_tokens + schedule.lag() + schedule.sides.keys.keep + keys,
        }
    }

    /// `now` where a window has hidden tokens, whose rows and codes are overwritten: a shorter
    /// sequence would see some of them. How far back they still are depends on what the sequence
    /// was before, so that none is given back.
    fn shortest_by_window(&self, now: usize) -> usize {
        let schedule = self.layout.schedule();
        if schedule.begin(now) > schedule.sink_tokens { now } else { 0 }
    }

    /// Writes the rows of a side of one sequence that are quantized now, and would be in float if
    /// it held `len` tokens, back into their float rows, where each token is quantized by itself.
    fn restore_rows(&mut self, side: Side, sequence: usize, len: usize) {
        let schedule = self.layout.schedule();
        let place = self.layout.sides()[side];
        if place.spec.is_none_or(|spec| spec.block_tokens() > 1) {
            return;
        }
        let sinks = schedule.sink_tokens;
        let (then, now) = (schedule.counts(len)[side], schedule.counts(self.lens[sequence])[side]);
        // Those that the shorter sequence does not have at all are forgotten.
        let tokens = then..now.min(len.saturating_sub(sinks));
        if tokens.is_empty() {
            return;
        }
        let float = self.layout.config().float;
        let restored = self.restore(side, tokens.clone());
        let Some(rows) = restored.map(|rows| rows.narrow(0, sequence, 1)) else { return };
        let rows = store(rows, float).cast(float.dtype());
        for run in place.runs(sinks + tokens.start..sinks + tokens.end) {
            let from = run.start - sinks - tokens.start;
            let part = rows.clone().narrow(2, from, run.len());
            self.state.put_rows(sequence, &place, run, part);
        }
    }
}

impl SideLayout {
    /// Consecutive tokens in runs whose float rows are adjacent.
    fn runs(&self, tokens: Range<usize>) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for token in tokens {
            match runs.last_mut() {
                Some(run) if self.row(token) == self.row(run.start) + run.len() => run.end += 1,
                _ => runs.push(token..token + 1),
            }
        }
        runs
    }
}

impl State {
    /// Overwrites the float rows of consecutive tokens of one side of one sequence, which are
    /// adjacent, with `rows` `[1, n_kv_heads, tokens, head_dim]`.
    fn put_rows(
        &mut self,
        sequence: usize,
        place: &SideLayout,
        tokens: Range<usize>,
        rows: Tensor<4>,
    ) {
        self.change(|words, floats| {
            let [_, heads, _, width] = floats.dims();
            // Rows of the tensor may be narrower than those of a side.
            let first = place.element(tokens.start) / width;
            let n = tokens.len() * place.head_dim / width;
            let rows = rows.reshape([1, heads, n, width]);
            let at = [sequence..sequence + 1, 0..heads, first..first + n, 0..width];
            (words, floats.slice_assign(at, rows))
        });
    }
}
