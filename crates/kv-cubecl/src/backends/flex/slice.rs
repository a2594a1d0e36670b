//! One (batch, kv head) slice of a cache, read tile by tile.

use core::ops::Range;

use burn::backend::Flex;

use super::{cache::Floats, quantize::dequantize_slice};
use crate::{
    CacheState,
    layout::{CacheLayout, Granularity, QuantSpec, QuantizedCounts},
};

/// Tokens per tile, small enough for the rows of a tile to stay in the L1 cache.
pub(super) const TILE: usize = 32;

/// One (batch, kv head) slice of a cache.
pub(super) struct Slice<'a> {
    pub(super) layout: &'a CacheLayout,
    pub(super) keys: &'a [u32],
    pub(super) values: &'a [u32],
    floats: Floats<'a>,
    /// First element of the slice in `floats`.
    float_start: usize,
    /// Tokens the cache holds.
    len: usize,
}

impl<'a> Slice<'a> {
    pub(super) fn new(
        state: &'a CacheState<Flex>,
        layout: &'a CacheLayout,
        len: usize,
        index: usize,
    ) -> Self {
        Self {
            layout,
            keys: &state.keys.storage()[index * layout.key_slice_words()..],
            values: &state.values.storage()[index * layout.value_slice_words()..],
            floats: Floats::of(&state.floats),
            float_start: index * layout.float_rows() * layout.shape().head_dim,
            len,
        }
    }

    pub(super) fn window_counts(&self) -> QuantizedCounts {
        self.layout.window().counts(self.len)
    }

    /// Restores the tokens `packed` of one side, counted after the sinks, tile by tile, and calls
    /// `visit` with the first token (counted from the first sink) and the rows of each tile. A
    /// range of keys must start at a group.
    pub(super) fn restored_tiles(
        &self,
        words: &[u32],
        packed: Range<usize>,
        sinks: usize,
        spec: QuantSpec,
        visit: &mut dyn FnMut(usize, &[f32]),
    ) {
        let head_dim = self.layout.shape().head_dim;
        // Keys are restored in whole groups, even if the range ends within one.
        let group = match spec.granularity {
            Granularity::PerChannel => spec.group_size,
            Granularity::PerToken => 1,
        };
        let step = group.max(TILE / group * group);
        let mut tile = vec![0.0; step * head_dim];
        for token in packed.clone().step_by(step) {
            let count = step.min(packed.end - token);
            let whole = count.div_ceil(group) * group;
            let start = spec.words(token, head_dim);
            let words = &words[start..start + spec.words(whole, head_dim)];
            dequantize_slice(words, &mut tile[..whole * head_dim], head_dim, &spec);
            visit(sinks + token, &tile[..count * head_dim]);
        }
    }

    /// Calls `visit` with the first token and the f32 rows of each run of tokens that are not
    /// packed and have adjacent float rows. `packed` is how many tokens after the sinks are packed,
    /// `row` the float row of a token; `widened` is scratch memory for a tile.
    pub(super) fn float_tiles(
        &self,
        tokens: Range<usize>,
        sinks: usize,
        packed: usize,
        row: impl Fn(usize) -> usize,
        widened: &mut [f32],
        mut visit: impl FnMut(usize, &[f32]),
    ) {
        let head_dim = self.layout.shape().head_dim;
        let first_recent = tokens.start.max(sinks + packed);
        for part in [tokens.start..tokens.end.min(sinks), first_recent..tokens.end] {
            let mut token = part.start;
            while token < part.end {
                let first = row(token);
                // A ring wraps at most once within itself.
                let wanted = TILE.min(part.end - token);
                let count = match row(token + wanted - 1) == first + wanted - 1 {
                    true => wanted,
                    false => (1..wanted).find(|&i| row(token + i) != first + i).unwrap_or(wanted),
                };
                let start = self.float_start + first * head_dim;
                visit(token, self.floats.rows(start, &mut widened[..count * head_dim]));
                token += count;
            }
        }
    }
}

/// The packed part of tokens `[start, end)`, counted after the sinks; `count` tokens after the
/// sinks are packed.
pub(super) fn packed_range(start: usize, end: usize, sinks: usize, count: usize) -> (usize, usize) {
    let clip = |token: usize| token.saturating_sub(sinks).min(count);
    (clip(start), clip(end))
}
