//! The sizes of the operations of sparse attention.

use super::{Compression, RowLayout};

/// The number of tokens per row of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "remote", derive(serde::Serialize, serde::Deserialize))]
pub struct Stride(pub usize);

impl Stride {
    /// A row for each token.
    pub const TOKENS: Self = Self(1);

    /// A row for each window.
    pub const fn entries(compression: Compression) -> Self {
        Self(compression.ratio)
    }

    /// Returns the first row and the number of rows that `count` tokens complete after `start`
    /// tokens.
    pub const fn rows(self, start: usize, count: usize) -> (usize, usize) {
        (start / self.0, (start + count) / self.0 - start / self.0)
    }

    /// Returns the most rows that `count` tokens complete.
    pub const fn most(self, count: usize) -> usize {
        count.div_ceil(self.0)
    }
}

/// The sizes of [`SparseOps::pool_windows`](super::SparseOps::pool_windows).
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "remote", derive(serde::Serialize, serde::Deserialize))]
pub struct PoolPlan {
    /// The tokens of an entry.
    pub compression: Compression,
    /// Channels of an entry.
    pub width: usize,
    /// The number added to the mean of squares.
    pub epsilon: f32,
    /// The most entries that the call completes in a sequence.
    pub entries: usize,
}

/// The sizes of [`SparseOps::attend_rows`](super::SparseOps::attend_rows).
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "remote", derive(serde::Serialize, serde::Deserialize))]
pub struct AttendPlan {
    /// The store of recent tokens.
    pub window: RowLayout,
    /// Recent tokens that a query sees, including its own.
    pub sliding_window: usize,
    /// The store of entries; without compression, nothing of it is read.
    pub entries: RowLayout,
    /// The tokens of an entry; `None` without entries.
    pub compression: Option<Compression>,
    /// True if a query sees only the selected entries.
    pub selects: bool,
    /// The factor of scores.
    pub scale: f32,
}
