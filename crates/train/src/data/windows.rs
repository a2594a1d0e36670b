use std::{iter, ops::Range, sync::Arc};

use super::{DataError, TokenFile};

/// Windows of `seq_len + 1` ids of a [`TokenFile`]: `seq_len` inputs and, one id later, as many
/// targets.
///
/// Neighbors overlap by one id, the last target of one and the first input of the next, so that
/// every token but the first is predicted exactly once. An incomplete window at the end of the
/// texts, fewer than `seq_len` tokens, is dropped.
#[derive(Clone, Debug)]
pub struct Windows {
    tokens: Arc<TokenFile>,
    seq_len: usize,
    /// The windows, as ranges of windows of the whole text, in the order in which they are
    /// numbered.
    ranges: Vec<Range<usize>>,
    /// The number of windows up to the end of each range.
    ends: Vec<usize>,
}

impl Windows {
    /// All windows of `tokens`.
    ///
    /// # Errors
    ///
    /// [`DataError::Argument`] when `seq_len` is 0, [`DataError::TooShort`] when the text has not
    /// one window.
    pub fn new(tokens: Arc<TokenFile>, seq_len: usize) -> Result<Self, DataError> {
        if seq_len == 0 {
            return Err(DataError::argument("seq_len", 0, "must be at least 1"));
        }
        let n = tokens.len().saturating_sub(1) / seq_len;
        let windows = Self { tokens, seq_len, ranges: Vec::new(), ends: Vec::new() };
        let windows = windows.part(iter::once(0..n));
        windows.require(1)?;
        Ok(windows)
    }

    fn part(&self, ranges: impl IntoIterator<Item = Range<usize>>) -> Self {
        let ranges: Vec<_> = ranges.into_iter().filter(|range| !range.is_empty()).collect();
        let count = |n: &mut usize, range: &Range<usize>| {
            *n += range.len();
            Some(*n)
        };
        let ends = ranges.iter().scan(0, count).collect();
        Self { tokens: self.tokens.clone(), seq_len: self.seq_len, ranges, ends }
    }

    fn require(&self, n: usize) -> Result<(), DataError> {
        if self.len() >= n {
            return Ok(());
        }
        Err(DataError::TooShort {
            tokens: self.tokens.len(),
            seq_len: self.seq_len,
            windows: n,
            needed: self.seq_len.saturating_mul(n).saturating_add(1),
        })
    }

    /// Splits into windows to train on and held-out windows from the end of each text: `fraction`
    /// of its windows, rounded, and at least one if it has two. Where that would be more than a
    /// tenth of all windows, as with many small texts, only some texts hold out a window, evenly
    /// spread over all of them.
    ///
    /// No held-out target is ever trained on, neither as target nor as input: where another text
    /// follows, the window after the held-out ones, which starts with their last target, is in
    /// neither part. The first held-out windows of all texts come first, then the second ones, and
    /// so on.
    ///
    /// # Errors
    ///
    /// [`DataError::Argument`] when `fraction` is not between 0 and 1, or leaves nothing to train
    /// on; [`DataError::TooShort`] when there are not two windows.
    pub fn hold_out(&self, fraction: f64) -> Result<(Self, Self), DataError> {
        if !(fraction > 0.0 && fraction < 1.0) {
            return Err(DataError::argument(
                "holdout",
                fraction,
                "must be above 0 and below 1, the fraction of windows kept for validation",
            ));
        }
        self.require(2)?;
        let tails: Vec<Range<usize>> = self.tails(fraction);
        // The window after a tail is excluded as well: it starts with the tail's last target.
        let taken =
            |window: usize| tails.iter().any(|tail| tail.contains(&window) || tail.end == window);
        let mut edges: Vec<usize> =
            tails.iter().flat_map(|t| [t.start, t.end, t.end + 1]).collect();
        edges.sort_unstable();
        let pieces = |range: &Range<usize>| {
            let inside = edges.iter().copied().filter(|edge| range.contains(edge));
            let cuts: Vec<usize> =
                [range.start].into_iter().chain(inside).chain([range.end]).collect();
            cuts.windows(2).map(|cut| cut[0]..cut[1]).collect::<Vec<_>>()
        };
        let kept = self.ranges.iter().flat_map(pieces);
        let train = self.part(kept.filter(|range| !range.is_empty() && !taken(range.start)));
        if train.is_empty() {
            let rule = format!("leaves nothing of {} windows to train on", self.len());
            return Err(DataError::argument("holdout", fraction, rule));
        }
        let valid = match &tails[..] {
            [tail] => self.part([tail.clone()]),
            tails => {
                let longest = tails.iter().map(Range::len).max().unwrap_or(0);
                let nth = |n: usize| {
                    let windows = tails.iter().map(move |tail| tail.start + n..tail.start + n + 1);
                    windows.zip(tails).filter(|(window, tail)| tail.contains(&window.start))
                };
                self.part((0..longest).flat_map(nth).map(|(window, _)| window))
            }
        };
        Ok((train, valid))
    }

    /// The windows at the end of each text that are held out.
    fn tails(&self, fraction: f64) -> Vec<Range<usize>> {
        let share = |n: usize| (n as f64 * fraction).round() as usize;
        // Whole windows of one text, in the last of the ranges that has any.
        let of_source = |source: Range<usize>| {
            let first = source.start.div_ceil(self.seq_len);
            let last = source.end.saturating_sub(1) / self.seq_len;
            let cut = |r: &Range<usize>| r.start.max(first)..r.end.min(last);
            self.ranges.iter().map(cut).rfind(|range| !range.is_empty())
        };
        let mut texts: Vec<Range<usize>> = self.tokens.sources().filter_map(of_source).collect();
        if texts.is_empty() {
            // Every text is shorter than a window: they are treated as one text.
            texts.extend(self.ranges.last().cloned());
        }
        let each = |range: &Range<usize>| match range.len() {
            0 | 1 if texts.len() > 1 => 0,
            n => share(n).max(1),
        };
        let mut counts: Vec<usize> = texts.iter().map(each).collect();
        let wanted = share(self.len()).max(1);
        if texts.len() > 1 && counts.iter().sum::<usize>() > wanted.max(self.len() / 10) {
            let mut before = 0;
            let upto = |before: usize| {
                (before as f64 * wanted as f64 / self.len() as f64).round() as usize
            };
            counts = texts
                .iter()
                .map(|range| {
                    let from = before;
                    before += range.len();
                    (upto(before) - upto(from)).min(range.len())
                })
                .collect();
        }
        if counts.iter().all(|&n| n == 0)
            && let Some(last) = counts.last_mut()
        {
            *last = 1;
        }
        let tail = |(range, n): (Range<usize>, usize)| range.end.saturating_sub(n)..range.end;
        texts.into_iter().zip(counts).filter(|&(_, n)| n > 0).map(tail).collect()
    }

    /// How many windows there are, at least 1.
    pub fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Always false, because a text without a window is an error.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ids predicted per window.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// The text these are windows of.
    pub fn tokens(&self) -> &Arc<TokenFile> {
        &self.tokens
    }

    /// The `seq_len + 1` ids of a window, `None` beyond the last.
    pub fn get(&self, index: usize) -> Option<impl Iterator<Item = u32> + '_> {
        let at = self.ends.partition_point(|&end| end <= index);
        let range = self.ranges.get(at)?;
        let start = (range.end - (self.ends[at] - index)) * self.seq_len;
        Some(self.tokens.ids(start..start + self.seq_len + 1))
    }

    /// The ids in these windows as running text, at most `n`, taken in equal parts from every
    /// contiguous piece of text. All ids but the first are targets of these windows.
    pub fn text(&self, n: usize) -> Vec<u32> {
        let mut ranges = self.ranges.clone();
        ranges.sort_by_key(|range| range.start);
        let mut pieces: Vec<Range<usize>> = Vec::new();
        for range in ranges {
            match pieces.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => pieces.push(range),
            }
        }
        let mut text = Vec::new();
        for (i, piece) in pieces.iter().enumerate() {
            let left = n.saturating_sub(text.len()) / (pieces.len() - i);
            // The first id of a piece is the last target of the window before it.
            let start = piece.start * self.seq_len + usize::from(i > 0);
            let end = piece.end * self.seq_len + 1;
            text.extend(self.tokens.ids(start..end.min(start.saturating_add(left))));
        }
        text
    }
}
