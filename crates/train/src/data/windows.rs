use std::{ops::Range, sync::Arc};

use super::{DataError, TokenFile};

/// Consecutive windows of `seq_len + 1` ids of a [`TokenFile`]: `seq_len` inputs, and as targets
/// the same ids one later.
///
/// Neighbours overlap by one id, the last target of one and the first input of the next, so that
/// every token but the first is predicted exactly once. An incomplete window at the end of the
/// text, fewer than `seq_len` tokens, is dropped.
#[derive(Clone, Debug)]
pub struct Windows {
    tokens: Arc<TokenFile>,
    seq_len: usize,
    range: Range<usize>,
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
        let windows = Self { tokens, seq_len, range: 0..n };
        windows.require(1)?;
        Ok(windows)
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

    /// Splits into windows to train on and, from the end of the text, held-out windows: `fraction`
    /// of all, rounded, at least one.
    ///
    /// The two are contiguous pieces of the text, so no held-out target is ever trained on, neither
    /// as target nor as input.
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
        let n = ((self.len() as f64 * fraction).round() as usize).max(1);
        if n >= self.len() {
            let rule = format!("leaves nothing of {} windows to train on", self.len());
            return Err(DataError::argument("holdout", fraction, rule));
        }
        let at = self.range.end - n;
        let part = |range| Self { range, ..self.clone() };
        Ok((part(self.range.start..at), part(at..self.range.end)))
    }

    /// How many windows there are, at least 1.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Never: a text without a window is an error.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
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
        if index >= self.len() {
            return None;
        }
        let start = (self.range.start + index) * self.seq_len;
        Some(self.tokens.ids(start..start + self.seq_len + 1))
    }
}
