//! Quantizes and restores slices of f32 in groups, and computes gradients through scales.

use macerator::{Scalar, Simd, Vector};

use super::{
    codes::CodeLayout,
    gradients::{Quantized, through_range},
    parameters::{F16_MAX, parameters, unpack_parameters},
    ranges::range_of,
};
use crate::{
    formats::{Granularity, GroupRange, QuantSpec},
    simd::{MAX_LANES, load, store},
};

/// Returns the divisor for a group of this scale: infinity instead of 0, so that the codes of a
/// constant group are 0.
#[inline(always)]
fn divisor(scale: f32) -> f32 {
    if scale == 0.0 { f32::INFINITY } else { scale }
}

/// Returns the codes of a vector of elements, given each lane's minimum and [`divisor`].
#[inline(always)]
fn encode_vector<S: Simd>(
    x: Vector<S, f32>,
    min: Vector<S, f32>,
    divisor: Vector<S, f32>,
    max_code: u32,
) -> Vector<S, u32> {
    // A NaN is replaced by the minimum, so that its code is 0.
    let x = x.eq(x).select(x.max((-F16_MAX).splat()).min(F16_MAX.splat()), min);
    let code = (x - min) / divisor;
    let code = code.max(0.0.splat()).min((max_code as f32).splat());
    // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits.
    (code + 12_582_912.0.splat()).reinterpret::<u32>() & max_code.splat()
}

/// Extends `range`, a minimum and a maximum per lane, by `x`; NaN is ignored.
#[inline(always)]
fn widen_range<S: Simd>(range: &mut [Vector<S, f32>; 2], x: Vector<S, f32>) {
    range[0] = x.eq(x).select(x.min(range[0]), range[0]);
    range[1] = x.eq(x).select(x.max(range[1]), range[1]);
}

/// Quantizes one group of tokens, `rows` `[group_size, head_dim]`, into its words: rows of codes,
/// then one row of parameters, each `head_dim` wide.
#[macerator::with_simd]
fn quantize_per_channel<S: Simd>(
    rows: &[f32],
    words: &mut [u32],
    head_dim: usize,
    n_bits: u32,
    range: GroupRange,
) {
    let lanes = f32::lanes::<S>();
    if head_dim < lanes {
        // Pads the channels with zeros to a whole vector, and drops their words afterwards.
        let (mut wide_rows, mut wide_words) = (Vec::new(), vec![0; words.len() / head_dim * lanes]);
        for row in rows.chunks_exact(head_dim) {
            wide_rows.extend_from_slice(row);
            wide_rows.resize(wide_rows.len() + lanes - head_dim, 0.0);
        }
        quantize_channels::<S>(&wide_rows, &mut wide_words, 0, lanes, n_bits, range);
        let wide = wide_words.chunks_exact(lanes);
        for (line, wide) in words.chunks_exact_mut(head_dim).zip(wide) {
            line.copy_from_slice(&wide[..head_dim]);
        }
        return;
    }
    for channel in (0..head_dim).step_by(lanes) {
        // The last vector may overlap the one before. Those channels are computed twice, with the
        // same result.
        let channel = channel.min(head_dim - lanes);
        quantize_channels::<S>(rows, words, channel, head_dim, n_bits, range);
    }
}

/// Quantizes one vector of channels, from `channel` on, for [`quantize_per_channel`].
#[inline(always)]
fn quantize_channels<S: Simd>(
    rows: &[f32],
    words: &mut [u32],
    channel: usize,
    head_dim: usize,
    n_bits: u32,
    rule: GroupRange,
) {
    let (lanes, max_code) = (f32::lanes::<S>(), (1u32 << n_bits) - 1);
    let mut range = [F16_MAX.splat::<S>(), (-F16_MAX).splat()];
    for row in rows.chunks_exact(head_dim) {
        widen_range(&mut range, load(&row[channel..]));
    }
    let [mut min, mut max, mut divisors] = [[0.0; MAX_LANES]; 3];
    store(&mut min, range[0].max((-F16_MAX).splat()));
    store(&mut max, range[1].min(F16_MAX.splat()));
    if rule != GroupRange::MinMax {
        for (i, (min, max)) in min.iter_mut().zip(&mut max).enumerate().take(lanes) {
            let column = rows[channel + i..].iter().copied().step_by(head_dim);
            (*min, *max) = range_of(column, rule, max_code);
        }
    }
    let (codes, params) = words.split_at_mut(words.len() - head_dim);
    for (i, word) in params[channel..][..lanes].iter_mut().enumerate() {
        let scale;
        (*word, scale, min[i]) = parameters(min[i], max[i], max_code as f32);
        divisors[i] = divisor(scale);
    }
    let (min, divisors) = (load(&min), load(&divisors));
    encode_vector_of_columns::<S>(rows, codes, channel, head_dim, n_bits, min, divisors);
}

/// Writes the codes of one vector of columns of `rows`, `[.., width]`, into lines of `width` words.
#[inline(always)]
fn encode_vector_of_columns<S: Simd>(
    rows: &[f32],
    lines: &mut [u32],
    column: usize,
    width: usize,
    n_bits: u32,
    min: Vector<S, f32>,
    divisors: Vector<S, f32>,
) {
    // The fewest codes that fill whole words.
    let codes_at_once = if n_bits == 3 { 32 } else { 32 / n_bits as usize };
    let max_code = (1u32 << n_bits) - 1;
    let lines = lines.chunks_exact_mut(codes_at_once * n_bits as usize / 32 * width);
    for (lines, rows) in lines.zip(rows.chunks_exact(codes_at_once * width)) {
        let mut words = [0u32.splat::<S>(); 3];
        for (i, row) in rows.chunks_exact(width).enumerate() {
            let code = encode_vector(load(&row[column..]), min, divisors, max_code);
            if n_bits == 3 {
                words[i / 16] |= (code & 3.splat()) << (i as u32 % 16 * 2);
                words[2] |= (code >> 2) << i as u32;
            } else {
                words[0] |= code << (i as u32 * n_bits);
            }
        }
        for (line, word) in lines.chunks_exact_mut(width).zip(words) {
            store(&mut line[column..], word);
        }
    }
}

/// Writes the codes of all columns of `rows` into lines of words. `min` and `steps` have one number
/// for each column, and columns fill whole vectors.
#[macerator::with_simd]
pub(in crate::formats) fn encode_columns<S: Simd>(
    rows: &[f32],
    lines: &mut [u32],
    n_bits: u32,
    min: &[f32],
    steps: &[f32],
) {
    debug_assert!(min.len().is_multiple_of(f32::lanes::<S>()));
    let divisors: Vec<f32> = steps.iter().map(|&step| divisor(step)).collect();
    for column in (0..min.len()).step_by(f32::lanes::<S>()) {
        let (low, divisors) = (load(&min[column..]), load(&divisors[column..]));
        encode_vector_of_columns::<S>(rows, lines, column, min.len(), n_bits, low, divisors);
    }
}

/// Quantizes tokens, rows of `[head_dim]`, each into its words: codes of `BITS` bits, then
/// parameters.
#[macerator::with_simd]
fn quantize_per_token_by<S: Simd, const BITS: usize>(
    rows: &[f32],
    words: &mut [u32],
    head_dim: usize,
    group_size: usize,
    rule: GroupRange,
) {
    let lanes = f32::lanes::<S>();
    let max_code = (1u32 << BITS) - 1;
    let (n_words, n_groups) = (CodeLayout::<BITS>::words(head_dim), head_dim / group_size);
    let tokens = rows.chunks_exact(head_dim).zip(words.chunks_exact_mut(n_words + n_groups));
    for (row, words) in tokens {
        let (codes, params) = words.split_at_mut(n_words);
        let lines = codes.chunks_exact_mut(CodeLayout::<BITS>::words(group_size));
        for ((group, line), param) in row.chunks_exact(group_size).zip(lines).zip(params) {
            let mut range = [F16_MAX.splat::<S>(), (-F16_MAX).splat()];
            for part in group.chunks(MAX_LANES) {
                let part = padded(part);
                for i in (0..MAX_LANES).step_by(lanes) {
                    widen_range(&mut range, load(&part[i..]));
                }
            }
            let (min, max) = match rule {
                GroupRange::MinMax => (range[0].reduce_min(), range[1].reduce_max()),
                rule => range_of(group.iter().copied(), rule, max_code),
            };
            let (word, scale, min) =
                parameters(min.max(-F16_MAX), max.min(F16_MAX), max_code as f32);
            *param = word;
            let (min, divisor) = (min.splat::<S>(), divisor(scale).splat());
            for (i, part) in group.chunks(MAX_LANES).enumerate() {
                let (first, n) = (i * MAX_LANES, part.len());
                let part = padded(part);
                let mut codes = [0; MAX_LANES];
                for i in (0..MAX_LANES).step_by(lanes) {
                    let code = encode_vector(load(&part[i..]), min, divisor, max_code);
                    store(&mut codes[i..], code);
                }
                write_codes::<BITS>(line, first, &codes[..n]);
            }
        }
    }
}

/// Writes codes into the words of a group, from element `first` on, a multiple of 16.
#[inline(always)]
pub(in crate::formats) fn write_codes<const BITS: usize>(
    words: &mut [u32],
    first: usize,
    codes: &[u32],
) {
    let place = |i: usize| i as u32 % CodeLayout::<BITS>::CODES as u32;
    for (run, codes) in codes.chunks(CodeLayout::<BITS>::CODES).enumerate() {
        let first = first + run * CodeLayout::<BITS>::CODES;
        let low = CodeLayout::<BITS>::low(first);
        if CodeLayout::<BITS>::SPLIT {
            let bits = |word, (i, code): (usize, &u32)| word | (code & 3) << (2 * place(i));
            words[low] = codes.iter().enumerate().fold(0, bits);
            let bits = |word, (i, code): (usize, &u32)| word | (code >> 2) << place(i);
            let high = codes.iter().enumerate().fold(0, bits);
            // Two runs share the word of their high bits.
            let (word, half) = (low + CodeLayout::<BITS>::high(first), first / 16 % 2);
            words[word] = if half == 0 { high } else { words[word] | high << 16 };
        } else {
            let bits = |word, (i, code): (usize, &u32)| word | code << (BITS as u32 * place(i));
            words[low] = codes.iter().enumerate().fold(0, bits);
        }
    }
}

/// Pads `part` to whole vectors with NaN, which a group's range ignores.
#[inline(always)]
fn padded(part: &[f32]) -> [f32; MAX_LANES] {
    let mut whole = [f32::NAN; MAX_LANES];
    whole[..part.len()].copy_from_slice(part);
    whole
}

/// Quantizes tokens, rows of `[head_dim]`.
fn quantize_per_token(rows: &[f32], words: &mut [u32], head_dim: usize, spec: &QuantSpec) {
    let kernel = match spec.n_bits {
        2 => quantize_per_token_by::<2>,
        3 => quantize_per_token_by::<3>,
        4 => quantize_per_token_by::<4>,
        _ => quantize_per_token_by::<8>,
    };
    kernel(rows, words, head_dim, spec.group_size, spec.range);
}

/// Returns code `nth` of the codes whose low bits share the word `low`, and whose high bits share
/// the word `high` if codes are split. `nth` is taken modulo the number of these codes.
#[inline(always)]
fn code<const BITS: usize>(low: u32, high: u32, nth: u32) -> u32 {
    let at = nth % CodeLayout::<BITS>::CODES as u32;
    if CodeLayout::<BITS>::SPLIT {
        (low >> (2 * at)) & 3 | (high >> (nth % 32) & 1) << 2
    } else {
        (low >> (BITS as u32 * at)) & ((1 << BITS) - 1)
    }
}

/// Restores one group of keys from its words.
#[macerator::with_simd]
fn dequantize_per_channel<S: Simd, const BITS: usize>(
    words: &[u32],
    rows: &mut [f32],
    head_dim: usize,
) {
    let (codes, params) = words.split_at(words.len() - head_dim);
    let (scale, min): (Vec<_>, Vec<_>) = params.iter().map(|&word| unpack_parameters(word)).unzip();
    for (token, row) in rows.chunks_exact_mut(head_dim).enumerate() {
        let low = CodeLayout::<BITS>::low(token);
        let line = |word: usize| &codes[word * head_dim..][..head_dim];
        // If codes are whole, the high line is the low line and is not read.
        let lines = line(low).iter().zip(line(low + CodeLayout::<BITS>::high(token)));
        let nth = (token % 32) as u32;
        for (((x, (&low, &high)), &scale), &min) in row.iter_mut().zip(lines).zip(&scale).zip(&min)
        {
            *x = code::<BITS>(low, high, nth) as i32 as f32 * scale + min;
        }
    }
}

/// Restores tokens from their words.
#[macerator::with_simd]
fn dequantize_per_token<S: Simd, const BITS: usize>(
    words: &[u32],
    out: &mut [f32],
    head_dim: usize,
    group_size: usize,
) {
    let (n_words, n_groups) = (CodeLayout::<BITS>::words(head_dim), head_dim / group_size);
    let tokens = words.chunks_exact(n_words + n_groups).zip(out.chunks_exact_mut(head_dim));
    for (words, row) in tokens {
        let (codes, params) = words.split_at(n_words);
        let lines = codes.chunks_exact(CodeLayout::<BITS>::words(group_size));
        for ((group, line), &param) in row.chunks_exact_mut(group_size).zip(lines).zip(params) {
            let (scale, min) = unpack_parameters(param);
            for (run, part) in group.chunks_exact_mut(CodeLayout::<BITS>::CODES).enumerate() {
                let first = run * CodeLayout::<BITS>::CODES;
                let low = CodeLayout::<BITS>::low(first);
                let (low, high) = (line[low], line[low + CodeLayout::<BITS>::high(first)]);
                for (i, x) in part.iter_mut().enumerate() {
                    let code = code::<BITS>(low, high, (first + i) as u32);
                    *x = code as i32 as f32 * scale + min;
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
                quantize_per_channel(rows, words, head_dim, spec.n_bits, spec.range);
            }
        }
        Granularity::PerToken => quantize_per_token(input, words, head_dim, spec),
    }
}

/// Restores one (batch, head) slice.
pub(super) fn dequantize_slice(words: &[u32], out: &mut [f32], head_dim: usize, spec: &QuantSpec) {
    let per_group = spec.words_per_group();
    match spec.granularity {
        Granularity::PerChannel => {
            let groups = out.chunks_exact_mut(spec.group_size * head_dim);
            let kernel = match spec.n_bits {
                2 => dequantize_per_channel::<2>,
                3 => dequantize_per_channel::<3>,
                4 => dequantize_per_channel::<4>,
                _ => dequantize_per_channel::<8>,
            };
            for (rows, words) in groups.zip(words.chunks_exact(per_group * head_dim)) {
                kernel(words, rows, head_dim);
            }
        }
        Granularity::PerToken => {
            let kernel = match spec.n_bits {
                2 => dequantize_per_token::<2>,
                3 => dequantize_per_token::<3>,
                4 => dequantize_per_token::<4>,
                _ => dequantize_per_token::<8>,
            };
            kernel(words, out, head_dim, spec.group_size);
        }
    }
}

/// Replaces `grad`, the gradient of a fake-quantized slice, by the gradient of `input`:
/// [`SteGradient::ScaleMin`](crate::SteGradient::ScaleMin).
pub(super) fn through_scales(input: &[f32], grad: &mut [f32], head_dim: usize, spec: &QuantSpec) {
    let group_size = spec.group_size;
    match spec.granularity {
        Granularity::PerChannel => {
            let (mut column, mut of_column) = (vec![0.0; group_size], vec![0.0; group_size]);
            let groups = input.chunks_exact(group_size * head_dim);
            for (rows, grad) in groups.zip(grad.chunks_exact_mut(group_size * head_dim)) {
                for channel in 0..head_dim {
                    copy_column(&rows[channel..], head_dim, &mut column);
                    copy_column(&grad[channel..], head_dim, &mut of_column);
                    through_group(&column, &mut of_column, spec);
                    let out = grad[channel..].iter_mut().step_by(head_dim);
                    out.zip(&of_column).for_each(|(out, &grad)| *out = grad);
                }
            }
        }
        Granularity::PerToken => {
            let groups = input.chunks_exact(group_size);
            for (group, grad) in groups.zip(grad.chunks_exact_mut(group_size)) {
                through_group(group, grad, spec);
            }
        }
    }
}

fn copy_column(rows: &[f32], stride: usize, column: &mut [f32]) {
    column.iter_mut().zip(rows.iter().step_by(stride)).for_each(|(to, from)| *to = *from);
}

fn through_group(group: &[f32], grad: &mut [f32], spec: &QuantSpec) {
    let range = range_of(group.iter().copied(), spec.range, spec.max_code());
    let (_, step, min) = parameters(range.0, range.1, spec.max_code() as f32);
    let quantized = Quantized { range, step, min, max_code: spec.max_code() };
    through_range(group, grad, spec.range, &quantized);
}
