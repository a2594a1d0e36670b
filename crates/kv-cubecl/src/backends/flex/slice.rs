//! One (batch, kv head) slice of a cache, read tile by tile.

use core::ops::Range;

use burn::backend::Flex;
use burn_flex::FlexTensor;

use super::cache::Floats;
use crate::{
    CacheState,
    formats::flex::PackedRun,
    layout::{CacheLayout, PackedLayout, Side, SideLayout},
};

/// One (batch, kv head) slice of a cache.
pub(super) struct Slice<'a> {
    pub(super) layout: &'a CacheLayout,
    pub(super) keys: SideSlice<'a>,
    pub(super) values: SideSlice<'a>,
}

/// The keys or the values of a slice.
pub(super) struct SideSlice<'a> {
    place: SideLayout,
    /// Number of packed tokens after the sinks, including those that the sliding window hides.
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
        let of_values = match layout.stored_side(Side::Values) {
            Side::Keys => &state.keys,
            Side::Values => &state.values,
        };
        Self {
            layout,
            keys: side(&state.keys, sides.keys, counts.keys),
            values: side(of_values, sides.values, counts.values),
        }
    }
}

impl SideSlice<'_> {
    /// Returns the channels of a stored token.
    pub(super) fn width(&self) -> usize {
        self.place.head_dim
    }

    /// Returns the layout of packed tokens, if there may be any.
    pub(super) fn packed_layout(&self) -> Option<PackedLayout> {
        self.place.packed()
    }

    /// The tokens of `tokens` that are packed, if there are any; `tokens` are those of a
    /// [block](super::blocks::block_end), so that their words follow each other.
    pub(super) fn packed(&self, tokens: &Range<usize>) -> Option<PackedRun<'_>> {
        let sinks = self.place.sinks;
        let clip = |token: usize| token.saturating_sub(sinks).min(self.n_packed);
        let packed = clip(tokens.start)..clip(tokens.end);
        let place = self.place.packed().filter(|_| !packed.is_empty())?;
        let skipped = packed.start + sinks - tokens.start;
        let slot = self.place.packed_slot(packed.start);
        let packed = slot..slot + packed.len();
        Some(PackedRun { words: self.words, place, tokens: packed, skipped })
    }

    /// Calls `visit` with the first token and the f32 rows of each run of tokens that are not
    /// packed and have adjacent float rows. `widened` is scratch memory, which limits the length of
    /// a run.
    pub(super) fn float_tiles(
        &self,
        tokens: Range<usize>,
        widened: &mut [f32],
        mut visit: impl FnMut(usize, &[f32]),
    ) {
        let place = &self.place;
        let head_dim = place.head_dim;
        let most = widened.len() / head_dim;
        let first_recent = tokens.start.max(place.sinks + self.n_packed);
        for part in [tokens.start..tokens.end.min(place.sinks), first_recent..tokens.end] {
            let mut token = part.start;
            while token < part.end {
                let first = place.row(token);
                // A ring wraps at most once within itself.
                let wanted = most.min(part.end - token);
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

    /// Calls `visit` with the first token and the rows, in f32, of each tile of `packed`, then of
    /// the tokens of `tokens` that are stored in float. Tiles are about as long as `widened`, the
    /// scratch memory.
    pub(super) fn tiles(
        &self,
        tokens: Range<usize>,
        packed: Option<PackedRun<'_>>,
        widened: &mut [f32],
        mut visit: impl FnMut(usize, &[f32]),
    ) {
        if let Some(run) = packed {
            let first = tokens.start + run.skipped;
            let tile = widened.len() / self.width();
            run.restored_tiles(tile, |at, rows| visit(first + at, rows));
        }
        self.float_tiles(tokens, widened, visit);
    }
}
