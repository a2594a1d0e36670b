//! Writing a cache: flush and append, in place.

use burn::{backend::Flex, tensor::DType};
use burn_flex::FlexTensor;
use half::f16;
use macerator::Simd;
use rayon::prelude::*;

use super::{dims, quantize};
use crate::{CacheFloat, CacheState, layout::CacheLayout};

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
}

impl<'a> Floats<'a> {
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

/// Converts f16 to f32, exactly. Written out because conversions one by one do not vectorize.
#[macerator::with_simd]
fn widen<S: Simd>(halves: &[f16], out: &mut [f32]) {
    const WIDEN: f32 = f32::from_bits((127 + 127 - 15) << 23);
    for (out, half) in out.iter_mut().zip(halves) {
        let bits = u32::from(half.to_bits());
        let magnitude = (f32::from_bits((bits & 0x7fff) << 13) * WIDEN).to_bits();
        let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
        *out = f32::from_bits(magnitude | special | (bits & 0x8000) << 16);
    }
}

/// The nearest finite f16.
fn narrow(x: f32) -> f16 {
    f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
}

/// Rounds to the stored float type, as a token that passes through the window is.
fn round(row: &mut [f32], float: CacheFloat) {
    if float == CacheFloat::F16 {
        for x in row {
            *x = narrow(*x).to_f32();
        }
    }
}

pub(super) fn flush(
    mut state: CacheState<Flex>,
    key: FlexTensor,
    value: FlexTensor,
    layout: &CacheLayout,
    len: usize,
) -> CacheState<Flex> {
    let [_, _, added, head_dim]: [usize; 4] = dims(&key);
    let window = layout.window();
    let (before, after) = (window.counts(len), window.counts(len + added));
    let (sinks, float) = (window.sink_tokens, layout.config().float);
    let floats = Floats::of(&state.floats);
    let slice_rows = layout.float_rows();
    // Row of a token that is in its ring, or in the chunk.
    let read = |slice: usize, chunk: &[f32], token: usize, row: usize, out: &mut [f32]| {
        if token < len {
            floats.read((slice * slice_rows + row) * head_dim, out);
        } else {
            out.copy_from_slice(&chunk[(slice * added + token - len) * head_dim..][..head_dim]);
            round(out, float);
        }
    };
    if let (Some(spec), true) = (layout.key_spec(), after.keys > before.keys) {
        let chunk: &[f32] = key.storage();
        let group_words = spec.words_per_group() * head_dim;
        let words = state.keys.storage_mut::<u32>();
        let slices = words.par_chunks_mut(layout.key_slice_words()).enumerate();
        slices.for_each(|(slice, words)| {
            let mut rows = vec![0.0; spec.group_size * head_dim];
            let first = before.keys / spec.group_size;
            let groups = words.chunks_exact_mut(group_words).enumerate();
            let due = after.keys / spec.group_size - first;
            for (group, words) in groups.skip(first).take(due) {
                for (i, row) in rows.chunks_exact_mut(head_dim).enumerate() {
                    let token = sinks + group * spec.group_size + i;
                    read(slice, chunk, token, layout.key_row(token), row);
                }
                quantize::quantize_keys(&rows, words, head_dim, spec.n_bits);
            }
        });
    }
    if let (Some(spec), true) = (layout.value_spec(), after.values > before.values) {
        let chunk: &[f32] = value.storage();
        let width = spec.words(1, head_dim);
        let words = state.values.storage_mut::<u32>();
        let slices = words.par_chunks_mut(layout.value_slice_words()).enumerate();
        slices.for_each(|(slice, words)| {
            let mut row = vec![0.0; head_dim];
            let due = after.values - before.values;
            for (i, words) in
                words.chunks_exact_mut(width).enumerate().skip(before.values).take(due)
            {
                let token = sinks + i;
                read(slice, chunk, token, layout.value_row(token), &mut row);
                quantize::quantize_value(&row, words, spec.group_size, spec.n_bits);
            }
        });
    }
    state
}

pub(super) fn append(
    mut state: CacheState<Flex>,
    key: FlexTensor,
    value: FlexTensor,
    layout: &CacheLayout,
    len: usize,
) -> CacheState<Flex> {
    let [_, _, added, head_dim]: [usize; 4] = dims(&key);
    let window = layout.window();
    let end = len + added;
    let (sinks, float_rows) = (window.sink_tokens, layout.float_rows());
    let (first_key, first_value) = (window.first_float_key(end), window.first_float_value(end));
    let (key, value): (&[f32], &[f32]) = (key.storage(), value.storage());
    // (source, destination row) of every row that stays in float.
    let moves = |slice: usize,
                 side: &[f32],
                 first: usize,
                 row: &dyn Fn(usize) -> usize,
                 store: &mut dyn FnMut(usize, &[f32])| {
        for token in (len..end).filter(|&token| token < sinks || token >= first) {
            let source = &side[(slice * added + token - len) * head_dim..][..head_dim];
            store((slice * float_rows + row(token)) * head_dim, source);
        }
    };
    let all = |store: &mut dyn FnMut(usize, &[f32])| {
        for slice in 0..layout.slices() {
            moves(slice, key, first_key, &|token| layout.key_row(token), store);
            moves(slice, value, first_value, &|token| layout.value_row(token), store);
        }
    };
    match state.floats.dtype() {
        DType::F16 => {
            let floats = state.floats.storage_mut::<f16>();
            all(&mut |at, row| {
                for (half, &x) in floats[at..at + head_dim].iter_mut().zip(row) {
                    *half = narrow(x);
                }
            });
        }
        _ => {
            let floats = state.floats.storage_mut::<f32>();
            all(&mut |at, row| floats[at..at + head_dim].copy_from_slice(row));
        }
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_exactly() {
        let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
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
