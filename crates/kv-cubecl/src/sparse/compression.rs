//! [`Compression`]: which tokens an entry stands for, and which entries a token sees.

use core::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{Result, error::invalid};

/// The compression of tokens to entries: every `ratio` consecutive tokens, a window, give one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Compression {
    /// The tokens of a window.
    pub ratio: usize,
    /// True if an entry also depends on the tokens of the window before its own. A projection then
    /// has other channels for them.
    pub overlap: bool,
}

impl Compression {
    /// Compresses every `ratio` tokens by themselves.
    pub const fn new(ratio: usize) -> Self {
        Self { ratio, overlap: false }
    }

    /// Compresses every `ratio` tokens together with the `ratio` tokens before them.
    pub const fn overlapping(ratio: usize) -> Self {
        Self { ratio, overlap: true }
    }

    /// Returns how many numbers a projection gives for each channel of an entry: one for the
    /// token's own window and, with overlap, one for the next window.
    pub const fn lanes(&self) -> usize {
        1 + self.overlap as usize
    }

    /// Returns the number of tokens that an entry depends on.
    pub const fn span(&self) -> usize {
        self.lanes() * self.ratio
    }

    /// Returns the number of entries that `tokens` tokens give. The token that completes a window
    /// is the first to see its entry.
    pub const fn entries(&self, tokens: usize) -> usize {
        tokens / self.ratio
    }

    /// Returns the tokens that `entry` depends on. With overlap, entry 0 has no window before its
    /// own.
    pub const fn tokens(&self, entry: usize) -> Range<usize> {
        let end = (entry + 1) * self.ratio;
        end.saturating_sub(self.span())..end
    }

    /// Returns the position whose rope an entry gets: the first token of its window.
    pub const fn position(&self, entry: usize) -> usize {
        entry * self.ratio
    }

    /// Checks the ratio.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) for a ratio of 0.
    pub(crate) fn validate(&self) -> Result<()> {
        match self.ratio {
            0 => Err(invalid("ratio", 0, "must be at least 1")),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_visible_from_the_token_that_completes_its_window() {
        let [plain, overlapping] = [Compression::new(4), Compression::overlapping(4)];
        assert_eq!([3, 4, 7, 8].map(|tokens| plain.entries(tokens)), [0, 1, 1, 2]);
        assert_eq!(plain.tokens(2), 8..12);
        assert_eq!([0, 1, 2].map(|entry| overlapping.tokens(entry)), [0..4, 0..8, 4..12]);
        assert_eq!(overlapping.position(2), 8);
    }
}
