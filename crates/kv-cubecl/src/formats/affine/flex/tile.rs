//! Rows and tiles that the float and integer kernels compute at a time.

use crate::formats::flex::SCRATCH_ROWS;

/// Most query rows computed together, so that each word is unpacked once for all of them.
///
/// With more rows, their sums no longer fit into 16 vector registers. Each row takes two rows of
/// scratch memory.
pub(super) const MAX_ROWS: usize = SCRATCH_ROWS / 2;

/// Tokens of values per tile: their folded weights have to stay in the L1 cache.
pub(super) const TILE: usize = 128;

/// Words of values per tile: they share the L1 cache with the next tile, which is being prefetched.
pub(super) const TILE_WORDS: usize = 1280;
