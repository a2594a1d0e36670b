//! Grouped quantization on slices.

use half::f16;
use macerator::Simd;

use crate::layout::{Granularity, QuantSpec};

/// Largest finite f16: parameters are f16, so inputs saturate here.
const F16_MAX: f32 = 65504.0;

/// Scale and minimum of a group, as stored and as used.
#[inline(always)]
fn parameters(min: f32, max: f32, max_code: f32) -> (u32, f32, f32) {
    let min_half = f16::from_f32(min);
    let scale_half = f16::from_f32((max - min) / max_code);
    let word = u32::from(scale_half.to_bits()) | u32::from(min_half.to_bits()) << 16;
    (word, scale_half.to_f32(), min_half.to_f32())
}

/// Scale and minimum in a parameter word.
///
/// Widening the exponent by multiplication is exact for every finite f16, subnormals included, and
/// vectorizes; parameters are always finite.
#[inline(always)]
pub(super) fn unpack_parameters(word: u32) -> (f32, f32) {
    const WIDEN: f32 = f32::from_bits((127 + 127 - 15) << 23);
    let scale = f32::from_bits((word & 0x7fff) << 13) * WIDEN;
    let min = f32::from_bits((word >> 16 & 0x7fff) << 13) * WIDEN;
    (scale, f32::from_bits(min.to_bits() | word & 0x8000_0000))
}

#[inline(always)]
fn encode(x: f32, scale: f32, min: f32, max_code: f32) -> f32 {
    let x = x.clamp(-F16_MAX, F16_MAX);
    // A zero scale divides to NaN or infinity; its code is 0 by definition.
    let code = ((x - min) / scale).clamp(0.0, max_code).round_ties_even();
    if scale == 0.0 { 0.0 } else { code }
}

/// Quantizes one group of keys, `rows` `[group_size, head_dim]`, into its words: code rows, then
/// one parameter row, each `head_dim` wide.
#[macerator::with_simd]
pub(super) fn quantize_keys<S: Simd>(
    rows: &[f32],
    words: &mut [u32],
    head_dim: usize,
    n_bits: u32,
) {
    let codes_per_word = 32 / n_bits as usize;
    let max_code = ((1u32 << n_bits) - 1) as f32;
    let (codes, params) = words.split_at_mut(words.len() - head_dim);
    let mut min = vec![F16_MAX; head_dim];
    let mut max = vec![-F16_MAX; head_dim];
    for row in rows.chunks_exact(head_dim) {
        for ((min, max), &x) in min.iter_mut().zip(&mut max).zip(row) {
            *min = min.min(x);
            *max = max.max(x);
        }
    }
    let mut scale = vec![0.0; head_dim];
    for (((word, scale), min), max) in params.iter_mut().zip(&mut scale).zip(&mut min).zip(max) {
        let clamped = (min.max(-F16_MAX), max.min(F16_MAX));
        (*word, *scale, *min) = parameters(clamped.0, clamped.1, max_code);
    }
    codes.fill(0);
    for (token, row) in rows.chunks_exact(head_dim).enumerate() {
        let shift = (token % codes_per_word) as u32 * n_bits;
        let line = &mut codes[token / codes_per_word * head_dim..][..head_dim];
        for (((word, &x), &scale), &min) in line.iter_mut().zip(row).zip(&scale).zip(&min) {
            *word |= (encode(x, scale, min, max_code) as i32 as u32) << shift;
        }
    }
}

/// Quantizes one token's values `row` `[head_dim]` into its words: codes, then parameters.
#[macerator::with_simd]
pub(super) fn quantize_value<S: Simd>(
    row: &[f32],
    words: &mut [u32],
    group_size: usize,
    n_bits: u32,
) {
    let codes_per_word = 32 / n_bits as usize;
    let max_code = ((1u32 << n_bits) - 1) as f32;
    let (codes, params) = words.split_at_mut(row.len() / codes_per_word);
    let lines = codes.chunks_exact_mut(group_size / codes_per_word);
    for ((group, line), param) in row.chunks_exact(group_size).zip(lines).zip(params) {
        let (mut min, mut max) = (F16_MAX, -F16_MAX);
        for &x in group {
            min = min.min(x);
            max = max.max(x);
        }
        let (word, scale, min) = parameters(min.max(-F16_MAX), max.min(F16_MAX), max_code);
        *param = word;
        for (word, part) in line.iter_mut().zip(group.chunks_exact(codes_per_word)) {
            *word = 0;
            for (i, &x) in part.iter().enumerate() {
                let code = encode(x, scale, min, max_code) as i32 as u32;
                *word |= code << (i as u32 * n_bits);
            }
        }
    }
}

/// Restores one group of keys from its words.
#[macerator::with_simd]
pub(super) fn dequantize_keys<S: Simd>(
    words: &[u32],
    rows: &mut [f32],
    head_dim: usize,
    n_bits: u32,
) {
    let codes_per_word = 32 / n_bits as usize;
    let mask = (1u32 << n_bits) - 1;
    let (codes, params) = words.split_at(words.len() - head_dim);
    let (scale, min): (Vec<_>, Vec<_>) = params.iter().map(|&word| unpack_parameters(word)).unzip();
    for (token, row) in rows.chunks_exact_mut(head_dim).enumerate() {
        let shift = (token % codes_per_word) as u32 * n_bits;
        let line = &codes[token / codes_per_word * head_dim..][..head_dim];
        for (((x, &word), &scale), &min) in row.iter_mut().zip(line).zip(&scale).zip(&min) {
            *x = ((word >> shift) & mask) as i32 as f32 * scale + min;
        }
    }
}

/// Restores tokens' values from their words, `CODES` codes to a word.
#[macerator::with_simd]
fn dequantize_values<S: Simd, const CODES: usize>(
    words: &[u32],
    out: &mut [f32],
    head_dim: usize,
    group_size: usize,
) {
    let n_bits = (32 / CODES) as u32;
    let mask = (1u32 << n_bits) - 1;
    let (n_words, n_groups) = (head_dim / CODES, head_dim / group_size);
    let tokens = words.chunks_exact(n_words + n_groups).zip(out.chunks_exact_mut(head_dim));
    for (words, row) in tokens {
        let (codes, params) = words.split_at(n_words);
        let lines = codes.chunks_exact(group_size / CODES);
        for ((group, line), &param) in row.chunks_exact_mut(group_size).zip(lines).zip(params) {
            let (scale, min) = unpack_parameters(param);
            let (parts, _) = group.as_chunks_mut::<CODES>();
            for (&word, part) in line.iter().zip(parts) {
                for (i, x) in part.iter_mut().enumerate() {
                    *x = ((word >> (i as u32 * n_bits)) & mask) as i32 as f32 * scale + min;
                }
            }
        }
    }
}

/// Quantizes one (batch, head) slice.
pub(super) fn quantize_slice(input: &[f32], words: &mut [u32], head_dim: usize, spec: &QuantSpec) {
    let per_group = spec.words_per_group();
    match spec.granularity {
        Granularity::PerChannel => {
            let groups = input.chunks_exact(spec.group_size * head_dim);
            for (rows, words) in groups.zip(words.chunks_exact_mut(per_group * head_dim)) {
                quantize_keys(rows, words, head_dim, spec.n_bits);
            }
        }
        Granularity::PerToken => {
            let width = spec.words(1, head_dim);
            for (row, words) in input.chunks_exact(head_dim).zip(words.chunks_exact_mut(width)) {
                quantize_value(row, words, spec.group_size, spec.n_bits);
            }
        }
    }
}

/// Restores one (batch, head) slice.
pub(super) fn dequantize_slice(words: &[u32], out: &mut [f32], head_dim: usize, spec: &QuantSpec) {
    let per_group = spec.words_per_group();
    match spec.granularity {
        Granularity::PerChannel => {
            let groups = out.chunks_exact_mut(spec.group_size * head_dim);
            for (rows, words) in groups.zip(words.chunks_exact(per_group * head_dim)) {
                dequantize_keys(words, rows, head_dim, spec.n_bits);
            }
        }
        Granularity::PerToken => {
            let kernel = match spec.n_bits {
                2 => dequantize_values::<16>,
                4 => dequantize_values::<8>,
                _ => dequantize_values::<4>,
            };
            kernel(words, out, head_dim, spec.group_size);
        }
    }
}

/// Adds to `grad`, the gradient of a fake-quantized slice, what passes through the scales:
/// [`SteGradient::ScaleMin`](crate::SteGradient::ScaleMin).
pub(super) fn add_scale_gradients(
    input: &[f32],
    grad: &mut [f32],
    head_dim: usize,
    spec: &QuantSpec,
) {
    let group_size = spec.group_size;
    match spec.granularity {
        Granularity::PerChannel => {
            let groups = input.chunks_exact(group_size * head_dim);
            for (rows, grad) in groups.zip(grad.chunks_exact_mut(group_size * head_dim)) {
                for channel in 0..head_dim {
                    let (column, grad) = (&rows[channel..], &mut grad[channel..]);
                    add_scale_gradient(column, grad, head_dim, spec.max_code());
                }
            }
        }
        Granularity::PerToken => {
            let groups = input.chunks_exact(group_size);
            for (group, grad) in groups.zip(grad.chunks_exact_mut(group_size)) {
                add_scale_gradient(group, grad, 1, spec.max_code());
            }
        }
    }
}

/// One group: every `stride`-th element.
fn add_scale_gradient(input: &[f32], grad: &mut [f32], stride: usize, max_code: u32) {
    let max_code = max_code as f32;
    let elements = || input.iter().map(|x| x.clamp(-F16_MAX, F16_MAX)).step_by(stride);
    let (mut lowest, mut highest) = ((F16_MAX, 0), (-F16_MAX, 0));
    for (i, x) in elements().enumerate() {
        if x < lowest.0 {
            lowest = (x, i);
        }
        if x > highest.0 {
            highest = (x, i);
        }
    }
    let (_, scale, min) = parameters(lowest.0, highest.0, max_code);
    if scale > 0.0 {
        let parts = elements().zip(grad.iter().step_by(stride)).map(|(x, grad)| {
            let error = encode(x, scale, min, max_code) - (x - min) / scale;
            grad * error.clamp(-0.5, 0.5)
        });
        let sum = parts.sum::<f32>() / max_code;
        grad[highest.1 * stride] += sum;
        grad[lowest.1 * stride] -= sum;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finite_half_widens_exactly() {
        for bits in 0..=u16::MAX {
            let half = f16::from_bits(bits);
            if half.is_finite() {
                let (scale, min) =
                    unpack_parameters(u32::from(bits) << 16 | u32::from(bits & 0x7fff));
                assert_eq!(min.to_bits(), half.to_f32().to_bits());
                assert_eq!(scale, half.to_f32().abs());
            }
        }
    }
}
