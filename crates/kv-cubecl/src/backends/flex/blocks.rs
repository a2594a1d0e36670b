//! Blocks of tokens whose scores are in memory at once, for chunk and decode attention.

use crate::layout::CacheLayout;

/// Tokens whose scores a thread has in memory at once, for a few query rows.
pub(super) const BLOCK: usize = 4096;

/// Returns the last token up to `token` where a block may end without splitting a group of packed
/// keys or a tile; among the sinks, and where no side has them, this is any token.
pub(super) fn between_groups(layout: &CacheLayout, token: usize) -> usize {
    let (sinks, group) = (layout.config().sink_tokens, layout.config().block_tokens());
    if token <= sinks { token } else { sinks + (token - sinks) / group * group }
}

/// Returns the end of the block of about `most` tokens that starts at `start` in a run of tokens
/// that ends at `end`: the words of its packed tokens follow each other.
pub(super) fn block_end(layout: &CacheLayout, start: usize, end: usize, most: usize) -> usize {
    let block = match start + block(layout, most) {
        block if block >= end => end,
        block => between_groups(layout, block),
    };
    block.min(layout.packed_run_end(start))
}

/// Returns the largest number of tokens in a block of about `most`: enough for at least one group.
pub(super) fn block(layout: &CacheLayout, most: usize) -> usize {
    most.max(layout.config().block_tokens())
}
