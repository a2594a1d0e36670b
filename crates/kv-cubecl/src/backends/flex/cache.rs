//! Writing a cache in place: flush (quantize what leaves the residual) and append.

use core::ops::Range;

use burn::backend::Flex;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::{
    CacheFloat, CacheState,
    layout::{CacheLayout, Side, SideLayout, Sides},
};

/// Float rows of a cache in their stored type.
#[derive(Clone, Copy)]
pub(super) enum Floats<'a> {
    /// Rows that can be read where they are.
    F32(&'a [f32]),
    /// The bytes of rows in another format.
    Other(&'a [u8], CacheFloat),
}

impl<'a> Floats<'a> {
    pub(super) fn of(tensor: &'a FlexTensor, float: CacheFloat) -> Self {
        match float {
            CacheFloat::F32 => Self::F32(tensor.storage()),
            float => Self::Other(tensor.bytes(), float),
        }
    }

    /// Fills `out` with the elements from `start` on, as f32.
    #[inline]
    pub(super) fn read(self, start: usize, out: &mut [f32]) {
        match self {
            Self::F32(rows) => out.copy_from_slice(&rows[start..start + out.len()]),
            Self::Other(bytes, float) => float.read(bytes, start, out),
        }
    }

    /// As [`read`](Self::read) into `scratch`, but without a copy where the elements are f32
    /// already.
    #[inline]
    pub(super) fn rows<'b>(self, start: usize, scratch: &'b mut [f32]) -> &'b [f32]
    where
        'a: 'b,
    {
        match self {
            Self::F32(rows) => &rows[start..start + scratch.len()],
            Self::Other(..) => {
                self.read(start, scratch);
                scratch
            }
        }
    }
}

/// Tokens of one side in float: those that a cache of `len` tokens has not quantized yet, and a
/// chunk of `added` tokens that follows.
pub(super) struct FloatTokens<'a> {
    float: CacheFloat,
    floats: Floats<'a>,
    slice_floats: usize,
    pub(super) place: SideLayout,
    chunk: &'a [f32],
    len: usize,
    added: usize,
}

impl<'a> FloatTokens<'a> {
    pub(super) fn new(
        floats: &'a FlexTensor,
        layout: &CacheLayout,
        side: Side,
        chunk: &'a [f32],
        len: usize,
        added: usize,
    ) -> Self {
        let (float, place) = (layout.config().float, layout.sides()[side]);
        let (floats, slice_floats) = (Floats::of(floats, float), layout.float_elements());
        Self { float, floats, slice_floats, place, chunk, len, added }
    }

    /// Fills `row` with a token of a slice, as the cache stores it.
    pub(super) fn read(&self, slice: usize, token: usize, row: &mut [f32]) {
        match token.checked_sub(self.len) {
            Some(token) => {
                let start = (slice * self.added + token) * row.len();
                row.copy_from_slice(&self.chunk[start..][..row.len()]);
                self.float.round_all(row);
            }
            None => self.floats.read(slice * self.slice_floats + self.place.element(token), row),
        }
    }
}

/// Quantizes what leaves the residual when `chunks`, keys and values `[.., added, head_dim]`, are
/// appended to the `len` tokens of some of the slices.
pub(super) fn flush(
    mut state: CacheState<Flex>,
    chunks: Sides<&[f32]>,
    layout: &CacheLayout,
    slices: &Range<usize>,
    len: usize,
    added: usize,
) -> CacheState<Flex> {
    let schedule = layout.schedule();
    let (before, after) = (schedule.counts(len), schedule.counts(len + added));
    for &side in layout.stored_sides() {
        let tokens = FloatTokens::new(&state.floats, layout, side, chunks[side], len, added);
        let (place, head_dim) = (&tokens.place, tokens.place.head_dim);
        let Some(packed) = place.packed() else { continue };
        if after[side] == before[side] {
            continue;
        }
        let (spec, block_tokens) = (packed.spec, packed.spec.block_tokens());
        let words = match side {
            Side::Keys => state.keys.storage_mut::<u32>(),
            Side::Values => state.values.storage_mut::<u32>(),
        };
        let (room, last) = (place.packed_tokens / block_tokens, after[side] / block_tokens);
        // Of more than there is room for, only the newest are kept.
        let first = (before[side] / block_tokens).max(last.saturating_sub(room));
        let slice_words = place.slice_words();
        // A word of a tile takes about 32 times as long as another word.
        let effort = if spec.tile.is_some() { 32 } else { 1 };
        let due_words = effort * spec.words((last - first) * block_tokens, head_dim);
        for_each_slice(words, slices, slice_words, due_words, |slice, words| {
            let mut rows = vec![0.0; block_tokens * head_dim];
            for index in first..last {
                for (i, row) in rows.chunks_exact_mut(head_dim).enumerate() {
                    tokens.read(slice, schedule.sink_tokens + index * block_tokens + i, row);
                }
                let slot = place.packed_slot(index * block_tokens);
                spec.format.on_cpu().quantize(&rows, words, slot, &packed);
            }
        });
    }
    state
}

/// Calls `write`, which takes as long as writing `due` words, with each slice of `words`. Uses
/// several threads where the work outweighs waking them. `words` may be longer than all slices: see
/// [`SideLayout::words`](crate::layout::SideLayout::words).
fn for_each_slice(
    words: &mut [u32],
    slices: &Range<usize>,
    slice_words: usize,
    due: usize,
    write: impl Fn(usize, &mut [u32]) + Sync,
) {
    /// Number of words whose writing takes about as long as waking a thread.
    const FEW: usize = 16 * 1024;
    let words = &mut words[slices.start * slice_words..slices.end * slice_words];
    let write = |(i, words): (usize, &mut [u32])| write(slices.start + i, words);
    if slices.len() * due <= FEW {
        words.chunks_mut(slice_words).enumerate().for_each(write);
    } else {
        words.par_chunks_mut(slice_words).enumerate().for_each(write);
    }
}

/// Writes new tokens of some slices into the float rows of the cache. A token is left out if it
/// comes before `first_kept` of itself, because it is quantized at once.
pub(super) fn append(
    mut state: CacheState<Flex>,
    chunks: Sides<&[f32]>,
    layout: &CacheLayout,
    slices: &Range<usize>,
    len: usize,
    added: usize,
    first_kept: impl Fn(usize) -> Sides<usize> + Copy,
) -> CacheState<Flex> {
    let (sides, slice_floats) = (layout.sides(), layout.float_elements());
    let both = slices
        .clone()
        .flat_map(|slice| layout.stored_sides().iter().map(move |&side| (slice, side)));
    let rows = both.flat_map(|(slice, side)| {
        let place = sides[side];
        let stays = move |&token: &usize| token < place.sinks || token >= first_kept(token)[side];
        (len..len + added).filter(stays).map(move |token| {
            let from = (slice * added + token - len) * place.head_dim;
            let to = slice * slice_floats + place.element(token);
            (to, &chunks[side][from..][..place.head_dim])
        })
    });
    layout.config().float.write(&mut state.floats, rows);
    state
}
