use std::{iter, ops::Range, sync::Arc};

use super::{DataError, TokenFile};

/// Windows of `seq_len + 1` ids of a [`TokenFile`]: `seq_len` inputs, and `seq_len` targets shifted
/// by one id.
///
/// Neighbors overlap by one id: the last target of one is the first input of the next, so every
/// token except the first is predicted exactly once. An incomplete window at the end of the texts
/// is dropped.
#[derive(Clone, Debug)]
pub struct Windows {
    tokens: Arc<TokenFile>,
    seq_len: usize,
    /// The windows, as ranges of window numbers in the whole text, in the order of their indices.
    ranges: Vec<Range<usize>>,
    /// Number of windows up to the end of each range.
    ends: Vec<usize>,
}

impl Windows {
    /// Creates all windows of `tokens`.
    ///
    /// # Errors
    /// [`DataError::Argument`] if `seq_len` is 0, [`DataError::TooShort`] if the text is shorter
    /// than one window.
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

    /// Splits into windows to train on and held-out windows from the end of each text. Each text
    /// holds out `fraction` of its windows, rounded, and at least one if it has two. If that
    /// exceeds a tenth of all windows, as with many small texts, only some evenly spread texts hold
    /// out a window.
    ///
    /// No held-out target is trained on, neither as target nor as input. The window after the
    /// held-out ones starts with their last target; if another text follows, that window is in
    /// neither part. The first held-out windows of all texts come first, then the second ones, and
    /// so on.
    ///
    /// # Errors
    /// [`DataError::Argument`] if `fraction` is not between 0 and 1 or leaves nothing to train on;
    /// [`DataError::TooShort`] if there are fewer than two windows.
    pub fn hold_out(&self, fraction: f64) -> Result<(Self, Self), DataError> {
        if !(fraction > 0.0 && fraction < 1.0) {
            return Err(DataError::argument(
                "holdout",
                fraction,
                "must be above 0 and below 1: the fraction of windows held out for validation",
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

    /// Returns the held-out windows at the end of each text.
    fn tails(&self, fraction: f64) -> Vec<Range<usize>> {
        let share = |n: usize| (n as f64 * fraction).round() as usize;
        // The complete windows of one text, in the last range that has any.
        let of_source = |source: Range<usize>| {
            let first = source.start.div_ceil(self.seq_len);
            let last = source.end.saturating_sub(1) / self.seq_len;
            let cut = |r: &Range<usize>| r.start.max(first)..r.end.min(last);
            self.ranges.iter().map(cut).rfind(|range| !range.is_empty())
        };
        let mut texts: Vec<Range<usize>> = self.tokens.sources().filter_map(of_source).collect();
        if texts.is_empty() {
            // If every text is shorter than a window, they are treated as one text.
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

    /// Returns the number of windows, at least 1.
    pub fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Always returns false, because a text without a window is an error.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ids predicted per window.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// The token file that the windows belong to.
    pub fn tokens(&self) -> &Arc<TokenFile> {
        &self.tokens
    }

    /// Returns the `seq_len + 1` ids of a window, or `None` beyond the last.
    pub fn get(&self, index: usize) -> Option<impl Iterator<Item = u32> + '_> {
        let at = self.ends.partition_point(|&end| end <= index);
        let range = self.ranges.get(at)?;
        let start = (range.end - (self.ends[at] - index)) * self.seq_len;
        Some(self.tokens.ids(start..start + self.seq_len + 1))
    }

    /// Returns the ids in these windows as running text, at most `n`, in equal parts from every
    /// contiguous piece of text. All ids except the first are targets of these windows.
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
