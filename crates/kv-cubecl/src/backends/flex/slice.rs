//! One (batch, kv head) slice of a cache, read tile by tile.

use core::ops::Range;

use burn::backend::Flex;
use burn_flex::FlexTensor;

use super::{cache::Floats, quantize::dequantize_slice};
use crate::{
    CacheState,
    layout::{CacheLayout, QuantSpec, SideLayout},
};

/// Tokens per tile, small enough for the rows of a tile to stay in the L1 cache.
pub(super) const TILE: usize = 32;

/// One (batch, kv head) slice of a cache.
pub(super) struct Slice<'a> {
    pub(super) layout: &'a CacheLayout,
    pub(super) keys: SideSlice<'a>,
    pub(super) values: SideSlice<'a>,
}

/// The keys or the values of a slice.
pub(super) struct SideSlice<'a> {
    place: SideLayout,
    /// How many tokens are packed, the first ones after the sinks.
    n_packed: usize,
    words: &'a [u32],
    floats: Floats<'a>,
    /// First element of the slice in `floats`.
    float_start: usize,
}

impl<'a> Slice<'a> {
    pub(super) fn new(
        state: &'a CacheState<Flex>,
        layout: &'a CacheLayout,
        len: usize,
        index: usize,
    ) -> Self {
        let (sides, counts) = (layout.sides(), layout.schedule().counts(len));
        let float_start = index * layout.float_elements();
        let side = |words: &'a FlexTensor, place: SideLayout, n_packed| SideSlice {
            words: &words.storage()[index * place.slice_words()..],
            place,
            n_packed,
            floats: Floats::of(&state.floats, layout.config().float),
            float_start,
        };
        Self {
            layout,
            keys: side(&state.keys, sides.keys, counts.keys),
            values: side(&state.values, sides.values, counts.values),
        }
    }
}

/// The packed ones of a run of tokens, counted after the sinks.
pub(super) struct PackedRun<'a> {
    pub(super) words: &'a [u32],
    pub(super) spec: QuantSpec,
    pub(super) tokens: Range<usize>,
    /// Tokens of the run before them.
    pub(super) skipped: usize,
}

impl SideSlice<'_> {
    /// The tokens of `tokens` that are packed, if there are any.
    pub(super) fn packed(&self, tokens: &Range<usize>) -> Option<PackedRun<'_>> {
        let sinks = self.place.sinks;
        let clip = |token: usize| token.saturating_sub(sinks).min(self.n_packed);
        let packed = clip(tokens.start)..clip(tokens.end);
        let spec = self.place.spec.filter(|_| !packed.is_empty())?;
        let skipped = packed.start + sinks - tokens.start;
        Some(PackedRun { words: self.words, spec, tokens: packed, skipped })
    }

    /// Calls `visit` with the first token and the restored rows of each tile of `run`, which starts at a
    /// granule.
    pub(super) fn restored_tiles(&self, run: &PackedRun<'_>, mut visit: impl FnMut(usize, &[f32])) {
        let PackedRun { spec, ref tokens, .. } = *run;
        let head_dim = self.place.head_dim;
        // Whole granules, although fewer tokens may be asked for.
        let granule = spec.granule();
        let step = granule.max(TILE / granule * granule);
        let mut tile = vec![0.0; step * head_dim];
        for token in tokens.clone().step_by(step) {
            let count = step.min(tokens.end - token);
            let whole = count.next_multiple_of(granule);
            let start = spec.words(token, head_dim);
            let words = &run.words[start..start + spec.words(whole, head_dim)];
            dequantize_slice(words, &mut tile[..whole * head_dim], head_dim, &spec);
            visit(self.place.sinks + token, &tile[..count * head_dim]);
        }
    }

    /// Calls `visit` with the first token and the f32 rows of each run of tokens that are not
    /// packed and have adjacent float rows. `packed` is how many tokens after the sinks are packed,
    /// `row` the float row of a token; `widened` is scratch memory for a tile.
    pub(super) fn float_tiles(
        &self,
        tokens: Range<usize>,
        widened: &mut [f32],
        mut visit: impl FnMut(usize, &[f32]),
    ) {
        let place = &self.place;
        let head_dim = place.head_dim;
        let first_recent = tokens.start.max(place.sinks + self.n_packed);
        for part in [tokens.start..tokens.end.min(place.sinks), first_recent..tokens.end] {
            let mut token = part.start;
            while token < part.end {
                let first = place.row(token);
                // A ring wraps at most once within itself.
                let wanted = TILE.min(part.end - token);
                let follows = |i: usize| place.row(token + i) == first + i;
                let count = match follows(wanted - 1) {
                    true => wanted,
                    false => (1..wanted).find(|&i| !follows(i)).unwrap_or(wanted),
                };
                let start = self.float_start + place.first_element + first * head_dim;
                visit(token, self.floats.rows(start, &mut widened[..count * head_dim]));
                token += count;
            }
        }
    }

    /// Calls `visit` with the first token and the rows, in f32, of each tile of `tokens`, packed or not.
    pub(super) fn tiles(
        &self,
        tokens: Range<usize>,
        widened: &mut [f32],
        mut visit: impl FnMut(usize, &[f32]),
    ) {
        if let Some(run) = self.packed(&tokens) {
            self.restored_tiles(&run, &mut visit);
        }
        self.float_tiles(tokens, widened, visit);
    }
}
