//! Writing a cache in place: flush (quantize what leaves the residual) and append.

use core::ops::Range;

use burn::backend::Flex;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::{
    CacheFloat, CacheState,
    layout::{CacheLayout, Side, Sides},
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
    let (schedule, sides, float) = (layout.schedule(), layout.sides(), layout.config().float);
    let (before, after) = (schedule.counts(len), schedule.counts(len + added));
    let floats = Floats::of(&state.floats, float);
    let slice_floats = layout.float_elements();
    for &side in layout.stored_sides() {
        let (place, chunk) = (&sides[side], chunks[side]);
        let head_dim = place.head_dim;
        let Some(packed) = place.packed() else { continue };
        if after[side] == before[side] {
            continue;
        }
        // A token is in its ring, or in the chunk.
        let read = |slice: usize, token: usize, out: &mut [f32]| {
            if token >= len {
                out.copy_from_slice(&chunk[(slice * added + token - len) * head_dim..][..head_dim]);
                float.round_all(out);
                return;
            }
            floats.read(slice * slice_floats + place.element(token), out);
        };
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
                    read(slice, schedule.sink_tokens + index * block_tokens + i, row);
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

/// Writes those of the new tokens of some slices that stay in float into their slots.
pub(super) fn append(
    mut state: CacheState<Flex>,
    chunks: Sides<&[f32]>,
    layout: &CacheLayout,
    slices: &Range<usize>,
    len: usize,
    added: usize,
) -> CacheState<Flex> {
    let (sides, kept) = (layout.sides(), layout.schedule().first_kept(len + added));
    let slice_floats = layout.float_elements();
    let both = slices
        .clone()
        .flat_map(|slice| layout.stored_sides().iter().map(move |&side| (slice, side)));
    let rows = both.flat_map(|(slice, side)| {
        let (place, first) = (sides[side], kept[side]);
        let stays = move |&token: &usize| token < place.sinks || token >= first;
        (len..len + added).filter(stays).map(move |token| {
            let from = (slice * added + token - len) * place.head_dim;
            let to = slice * slice_floats + place.element(token);
            (to, &chunks[side][from..][..place.head_dim])
        })
    });
    layout.config().float.write(&mut state.floats, rows);
    state
}
