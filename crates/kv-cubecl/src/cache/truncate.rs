//! Truncating a sequence to its first tokens.

use core::ops::Range;

use burn::tensor::Tensor;

use super::{KvCache, state::State};
use crate::{
    Result,
    error::invalid,
    functions::store,
    layout::{Side, SideLayout},
    sequences::check_sequence,
};

impl KvCache {
    /// Removes all tokens of one sequence after the first `len`, for example drafted tokens that
    /// speculative decoding rejects.
    ///
    /// Keys that are quantized in groups of tokens cannot return to float, so a sequence is cut
    /// back no further than [`shortest`](Self::shortest). Values, and keys in other formats, are
    /// quantized one by one. Those quantized after `len` are restored, rounded to the float type
    /// and written to the float rows of a sequence of `len` tokens, after the Hadamard transform if
    /// there is one. The cache is then as if `len` tokens with these rows had been appended.
    ///
    /// When restored tokens leave the residual again, they get the same codes, because restored
    /// numbers have the minimum of their group and, if it has the largest code, its scale. There
    /// are four exceptions:
    ///
    /// - Groups that are further from 0 than 1500 steps of their codes.
    /// - Rows of 16 bits, whose rounding may change the last bit of a scale.
    /// - Scales that are powers of two: a block may get the next power, and other codes for the
    ///   same numbers.
    /// - Lloyd-Max codes: they are of numbers divided by the root mean square, and that of restored
    ///   numbers has been rounded and may be another one for a token with an outlier.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) for a sequence that the batch does not
    /// have, and for a `len` above its tokens or below the shortest. On failure the cache is
    /// unchanged.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<()> {
        let shortest = self.shortest(sequence)?;
        let now = self.lens[sequence];
        if len > now {
            let rule = format!("must be at most the {now} tokens of sequence {sequence}");
            return Err(invalid("len", len, rule));
        }
        if len < shortest {
            let why = match len < self.shortest_by_blocks(now) {
                true => "keys of the tokens before are quantized",
                false => "its window has left tokens that would be seen",
            };
            let rule = format!(
                "must be at least {shortest} for sequence {sequence} of {now} tokens: {why}"
            );
            return Err(invalid("len", len, rule));
        }
        for &side in self.layout.stored_sides() {
            self.restore_rows(side, sequence, len);
        }
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
        check_sequence("sequence", sequence, self.lens.len())?;
        let now = self.lens[sequence];
        Ok(self.shortest_by_blocks(now).max(self.shortest_by_window(now)))
    }

    /// Truncates a sequence to the [exact](Self::exact) number of tokens up to `len`, and returns
    /// that number.
    ///
    /// # Errors
    /// Fails as [`exact`](Self::exact) does.
    pub fn cut_back(&mut self, sequence: usize, len: usize) -> Result<usize> {
        let exact = self.exact(sequence, len)?;
        self.lens[sequence] = exact;
        Ok(exact)
    }

    /// Returns the largest number of tokens up to `len` at which [`cut_back`](Self::cut_back)
    /// leaves the cache of a sequence that never was longer, bit for bit.
    ///
    /// It is `len` itself if both sides are in float or quantized as soon as they are appended, or
    /// if no token was quantized since. Keys that are quantized in blocks can be cut at the end of
    /// each block. Other rows that were in float at `len` and are quantized now are lost. Then only
    /// the sinks remain, as they do if a sliding window has hidden tokens. Lost tokens have to be
    /// computed again; [`truncate`](Self::truncate) restores them from their codes instead.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) for a sequence that the batch does not
    /// have, and for a `len` above its tokens.
    pub fn exact(&self, sequence: usize, len: usize) -> Result<usize> {
        check_sequence("sequence", sequence, self.lens.len())?;
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

    /// Returns the smallest length with as many tokens quantized in blocks as `now` tokens have, on
    /// both sides.
    fn shortest_by_blocks(&self, now: usize) -> usize {
        let (schedule, sides) = (self.layout.schedule(), self.layout.sides());
        let shortest = Side::BOTH.map(|side| {
            let in_blocks = sides[side].spec.is_some_and(|spec| spec.block_tokens() > 1);
            match schedule.counts(now)[side] {
                count if count == 0 || !in_blocks => 0,
                count => schedule.sink_tokens + schedule.lag() + schedule.sides[side].keep + count,
            }
        });
        shortest[0].max(shortest[1])
    }

    /// Returns `now` if the sliding window has hidden tokens, else 0.
    ///
    /// A shorter sequence would see hidden tokens, whose rows and codes may be overwritten. How
    /// many are left depends on the history of the sequence, so none is used.
    fn shortest_by_window(&self, now: usize) -> usize {
        let schedule = self.layout.schedule();
        if schedule.begin(now) > schedule.sink_tokens { now } else { 0 }
    }

    /// Restores the tokens of one sequence that are quantized now and would be in float after `len`
    /// tokens, and writes them to their float rows. Does nothing to sides quantized in blocks.
    fn restore_rows(&mut self, side: Side, sequence: usize, len: usize) {
        let schedule = self.layout.schedule();
        let place = self.layout.sides()[side];
        if place.spec.is_none_or(|spec| spec.block_tokens() > 1) {
            return;
        }
        let sinks = schedule.sink_tokens;
        let (then, now) = (schedule.counts(len)[side], schedule.counts(self.lens[sequence])[side]);
        // Tokens after `len` are dropped.
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
    /// Splits consecutive tokens into runs whose float rows are adjacent.
    pub(super) fn runs(&self, tokens: Range<usize>) -> Vec<Range<usize>> {
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
    /// Overwrites the adjacent float rows of consecutive tokens of one sequence and side with
    /// `rows` `[1, n_kv_heads, tokens, head_dim]`.
    pub(super) fn put_rows(
        &mut self,
        sequence: usize,
        place: &SideLayout,
        tokens: Range<usize>,
        rows: Tensor<4>,
    ) {
        self.change(|words, floats| {
            let [_, heads, _, width] = floats.dims();
            // Rows of the tensor may be narrower than rows of a side.
            let first = place.element(tokens.start) / width;
            let n = tokens.len() * place.head_dim / width;
            let rows = rows.reshape([1, heads, n, width]);
            let at = [sequence..sequence + 1, 0..heads, first..first + n, 0..width];
            (words, floats.slice_assign(at, rows))
        });
    }
}
