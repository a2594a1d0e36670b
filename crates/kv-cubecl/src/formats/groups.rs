//! How the numbers of a side form groups, each with one parameter.

use super::{range::GroupRange, tile::Tile};

/// The options of the groups of one side, for the formats that have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupOptions {
    /// Elements per group of KIVI's formats.
    pub group_size: usize,
    /// The range that the codes of a group cover.
    pub range: GroupRange,
    /// The tiles of `vn2` to `vn4`.
    pub tile: Tile,
}

impl GroupOptions {
    /// Groups of this size, and otherwise the defaults of KIVI's formats and of tiles.
    pub const fn new(group_size: usize) -> Self {
        Self { group_size, range: GroupRange::MinMax, tile: Tile::KVARN }
    }
}

/// The numbers that share one parameter.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Groups {
    /// KIVI's groups, of the configuration's group size: tokens for keys, channels for values.
    Kivi,
    /// All channels of one token.
    Token,
    /// All tokens of a tile for each channel of keys, all channels for each token of values. The
    /// tile is [normalized](super::normalized) first.
    Tile,
    /// A block of `n` channels of one token.
    Blocks(usize),
    /// All tokens of one head of a frame. Each token stores its own copy of the parameter.
    Frame(FrameScale),
}

/// The magnitude of a frame from which its scale follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameScale {
    /// The largest magnitude.
    Largest,
    /// A percentile of the magnitudes.
    Percentile,
}
