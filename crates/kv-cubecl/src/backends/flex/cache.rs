//! Writing a cache: flush and append, in place.

use core::ops::Range;

use burn::{backend::Flex, tensor::DType};
use burn_flex::FlexTensor;
use half::{f16, slice::HalfFloatSliceExt};
use rayon::prelude::*;

use super::quantize;
use crate::{
    CacheFloat, CacheState,
    layout::{CacheLayout, Side, Sides},
};

/// Float rows of a cache in their stored type.
#[derive(Clone, Copy)]
pub(super) enum Floats<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
}

impl<'a> Floats<'a> {
    pub(super) fn of(tensor: &'a FlexTensor) -> Self {
        match tensor.dtype() {
            DType::F16 => Self::F16(tensor.storage()),
            _ => Self::F32(tensor.storage()),
        }
    }

    /// Elements `[start, start + out.len())` as f32.
    #[inline]
    pub(super) fn read(self, start: usize, out: &mut [f32]) {
        match self {
            Self::F32(data) => out.copy_from_slice(&data[start..start + out.len()]),
            Self::F16(data) => widen(&data[start..start + out.len()], out),
        }
    }

    /// As [`read`](Self::read), without a copy where the rows are f32 already.
    #[inline]
    pub(super) fn rows<'b>(self, start: usize, scratch: &'b mut [f32]) -> &'b [f32]
    where
        'a: 'b,
    {
        match self {
            Self::F32(data) => &data[start..start + scratch.len()],
            Self::F16(_) => {
                self.read(start, scratch);
                scratch
            }
        }
    }
}

/// Converts f16 to f32, exactly.
fn widen(halves: &[f16], out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("f16c") {
        // SAFETY: the CPU has the extension.
        unsafe { widen_f16c(halves, out) };
        return;
    }
    halves.convert_to_f32_slice(out);
}

/// As half's conversion, which calls a function for every eight.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,f16c")]
fn widen_f16c(halves: &[f16], out: &mut [f32]) {
    use core::arch::x86_64::{_mm_loadu_si128, _mm256_cvtph_ps, _mm256_storeu_ps};
    let ((halves, rest), (out, rest_out)) = (halves.as_chunks::<8>(), out.as_chunks_mut::<8>());
    for (halves, out) in halves.iter().zip(out) {
        // SAFETY: both hold eight elements.
        unsafe {
            let halves = _mm_loadu_si128(halves.as_ptr().cast());
            _mm256_storeu_ps(out.as_mut_ptr(), _mm256_cvtph_ps(halves));
        }
    }
    rest.convert_to_f32_slice(rest_out);
}

/// The nearest finite f16, or NaN.
fn narrow(x: f32) -> f16 {
    f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
}

/// Rounds to the stored float type, as a token that passes through the window is.
pub(super) fn round(row: &mut [f32], float: CacheFloat) {
    if float == CacheFloat::F16 {
        for x in row {
            *x = narrow(*x).to_f32();
        }
    }
}

/// Quantizes what leaves the window when `chunks`, keys and values `[.., added, head_dim]`, are appended to
/// the `len` tokens of some of the slices.
pub(super) fn flush(
    mut state: CacheState<Flex>,
    chunks: Sides<&[f32]>,
    layout: &CacheLayout,
    slices: &Range<usize>,
    len: usize,
    added: usize,
) -> CacheState<Flex> {
    let head_dim = layout.shape().head_dim;
    let (schedule, sides, float) = (layout.schedule(), layout.sides(), layout.config().float);
    let (before, after) = (schedule.counts(len), schedule.counts(len + added));
    let floats = Floats::of(&state.floats);
    let slice_rows = layout.float_rows();
    for side in Side::BOTH {
        let (place, chunk) = (&sides[side], chunks[side]);
        let Some(spec) = place.spec else { continue };
        if after[side] == before[side] {
            continue;
        }
        // A token is in its ring, or in the chunk.
        let read = |slice: usize, token: usize, out: &mut [f32]| {
            if token < len {
                floats.read((slice * slice_rows + place.row(token)) * head_dim, out);
            } else {
                out.copy_from_slice(&chunk[(slice * added + token - len) * head_dim..][..head_dim]);
                round(out, float);
            }
        };
        let granule = spec.granule();
        let granule_words = spec.words(granule, head_dim);
        let words = match side {
            Side::Keys => state.keys.storage_mut::<u32>(),
            Side::Values => state.values.storage_mut::<u32>(),
        };
        let first = before[side] / granule;
        let due = after[side] / granule - first;
        let slice_words = place.slice_words();
        let due_words = due * granule_words;
        for_each_slice(words, slices, slice_words, due_words, |slice, words| {
            let mut rows = vec![0.0; granule * head_dim];
            let granules = words.chunks_exact_mut(granule_words).enumerate();
            for (index, words) in granules.skip(first).take(due) {
                for (i, row) in rows.chunks_exact_mut(head_dim).enumerate() {
                    read(slice, schedule.sink_tokens + index * granule + i, row);
                }
                quantize::quantize_slice(&rows, words, head_dim, &spec);
            }
        });
    }
    state
}

/// Calls `write` with each slice of `words`, of which it writes `due`; by several threads if that is
/// worth waking them. There may be more words than those of the slices: see [`SideLayout::words`](crate::layout::SideLayout::words).
fn for_each_slice(
    words: &mut [u32],
    slices: &Range<usize>,
    slice_words: usize,
    due: usize,
    write: impl Fn(usize, &mut [u32]) + Sync,
) {
    /// Words that take as long to write as a thread to wake up.
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
    match state.floats.dtype() {
        DType::F16 => {
            let floats = state.floats.storage_mut::<f16>();
            store_rows(floats, chunks, layout, slices, len, added, |halves, row| {
                for (half, &x) in halves.iter_mut().zip(row) {
                    *half = narrow(x);
                }
            });
        }
        _ => {
            let floats = state.floats.storage_mut::<f32>();
            store_rows(floats, chunks, layout, slices, len, added, <[f32]>::copy_from_slice);
        }
    }
    state
}

/// Calls `store` with the slot and the row of each new token that stays in float.
fn store_rows<R>(
    floats: &mut [R],
    chunks: Sides<&[f32]>,
    layout: &CacheLayout,
    slices: &Range<usize>,
    len: usize,
    added: usize,
    store: impl Fn(&mut [R], &[f32]),
) {
    let head_dim = layout.shape().head_dim;
    let (sides, first_float) = (layout.sides(), layout.schedule().first_float(len + added));
    let float_rows = layout.float_rows();
    for slice in slices.clone() {
        for side in Side::BOTH {
            let (place, first) = (&sides[side], first_float[side]);
            let stays = |&token: &usize| token < place.sinks || token >= first;
            for token in (len..len + added).filter(stays) {
                let from = (slice * added + token - len) * head_dim;
                let to = (slice * float_rows + place.row(token)) * head_dim;
                store(&mut floats[to..][..head_dim], &chunks[side][from..][..head_dim]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_exactly() {
        // One less than a multiple of eight, so that some are left over.
        let halves: Vec<f16> = (0..u16::MAX).map(f16::from_bits).collect();
        let mut out = vec![0.0; halves.len()];
        widen(&halves, &mut out);
        for (half, out) in halves.iter().zip(out) {
            match half.is_nan() {
                true => assert!(out.is_nan()),
                false => assert_eq!(out.to_bits(), half.to_f32().to_bits()),
            }
        }
    }
}
