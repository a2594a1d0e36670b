//! Rows and tiles that the float and integer kernels compute at a time.

use super::widen::widened;
use crate::formats::flex::SCRATCH_ROWS;

/// Most query rows computed together, so that each word is unpacked once for all of them.
///
/// With more rows, their sums no longer fit into 16 vector registers.
pub(super) const MAX_ROWS: usize = 4;

/// Tokens of values per tile: their folded weights have to stay in the L1 cache.
pub(super) const TILE: usize = 128;

/// Words of values per tile: they share the L1 cache with the next tile, which is being prefetched.
pub(super) const TILE_WORDS: usize = 1280;

/// Scratch memory of [`add_words`](super::sums::add_words), aligned so that no vector crosses a
/// cache line. Its contents are of no use to the next call.
#[repr(align(64))]
pub(in crate::formats) struct AddScratch {
    /// The codes of a tile as the kernel reads them.
    pub(super) words: [u32; widened(TILE_WORDS)],
    pub(super) params: [u32; TILE],
    /// Weights times scales of each row.
    pub(super) folded: [[f32; TILE]; SCRATCH_ROWS / 2],
}

impl Default for AddScratch {
    fn default() -> Self {
        Self {
            words: [0; widened(TILE_WORDS)],
            params: [0; TILE],
            folded: [[0.0; TILE]; SCRATCH_ROWS / 2],
        }
    }
}
