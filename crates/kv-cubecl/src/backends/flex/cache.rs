//! Writing a cache in place: flush (quantize what leaves the window) and append.

use burn::{backend::Flex, tensor::DType};
use burn_flex::FlexTensor;
use half::{f16, slice::HalfFloatSliceExt};
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

/// [`widen`] with F16C instructions. The conversion of the half crate makes a function call for
/// every eight elements.
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

/// The nearest finite f16; NaN stays NaN.
fn narrow(x: f32) -> f16 {
    f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
}

/// Rounds a row to the stored float type. Tokens of a chunk that are quantized without having been
/// stored must be rounded as if they had been.
pub(super) fn round(row: &mut [f32], float: CacheFloat) {
    if float == CacheFloat::F16 {
        for x in row {
            *x = narrow(*x).to_f32();
        }
    }
}

/// Quantizes what leaves the window when `key` and `value` are appended.
pub(super) fn flush(
    mut state: CacheState<Flex>,
    key: &FlexTensor,
    value: &FlexTensor,
    layout: &CacheLayout,
    len: usize,
) -> CacheState<Flex> {
    let [_, _, added, head_dim]: [usize; 4] = dims(key);
    let window = layout.window();
    let (before, after) = (window.counts(len), window.counts(len + added));
    let (sinks, float) = (window.sink_tokens, layout.config().float);
    let floats = Floats::of(&state.floats);
    let slice_rows = layout.float_rows();
    // Reads the row of `token`: float row `row` of the cache or, for a new token, from the chunk.
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
        let first = before.keys / spec.group_size;
        let due = after.keys / spec.group_size - first;
        let slice_words = layout.key_slice_words();
        for_each_slice(words, layout.slices(), slice_words, due * group_words, |slice, words| {
            let mut rows = vec![0.0; spec.group_size * head_dim];
            let groups = words.chunks_exact_mut(group_words).enumerate();
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
        let due = after.values - before.values;
        let slice_words = layout.value_slice_words();
        for_each_slice(words, layout.slices(), slice_words, due * width, |slice, words| {
            let mut row = vec![0.0; head_dim];
            let tokens = words.chunks_exact_mut(width).enumerate();
            for (i, words) in tokens.skip(before.values).take(due) {
                let token = sinks + i;
                read(slice, chunk, token, layout.value_row(token), &mut row);
                quantize::quantize_values(&row, words, head_dim, &spec);
            }
        });
    }
    state
}

/// Calls `write` with the index and the words of each slice, on several threads if `due`, the
/// number of words that each call writes, makes that worthwhile. `words` may be longer than all
/// slices together: see [`CacheLayout::key_words`].
fn for_each_slice(
    words: &mut [u32],
    slices: usize,
    slice_words: usize,
    due: usize,
    write: impl Fn(usize, &mut [u32]) + Sync,
) {
    /// Number of words whose writing takes about as long as waking a thread.
    const FEW: usize = 16 * 1024;
    let words = &mut words[..slices * slice_words];
    if slices * due <= FEW {
        words.chunks_mut(slice_words).enumerate().for_each(|(i, words)| write(i, words));
    } else {
        words.par_chunks_mut(slice_words).enumerate().for_each(|(i, words)| write(i, words));
    }
}

/// Writes the float rows of the new tokens that are not quantized at once.
pub(super) fn append(
    mut state: CacheState<Flex>,
    key: &FlexTensor,
    value: &FlexTensor,
    layout: &CacheLayout,
    len: usize,
) -> CacheState<Flex> {
    let [_, _, added, head_dim]: [usize; 4] = dims(key);
    let window = layout.window();
    let end = len + added;
    let (sinks, float_rows) = (window.sink_tokens, layout.float_rows());
    let (first_key, first_value) = (window.first_float_key(end), window.first_float_value(end));
    let (key, value): (&[f32], &[f32]) = (key.storage(), value.storage());
    // Calls `store` with the first destination element and the source row of every such token.
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
        // 65535 elements, not a multiple of eight, so that the conversion of a remainder is tested
        // too.
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
