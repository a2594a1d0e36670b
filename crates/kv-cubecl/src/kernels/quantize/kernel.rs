use cubecl::prelude::*;

use crate::kernels::codec::{
    F16_MAX, code_at, encode, greater, is_nan, lesser, min_of, parameters, saturate, scale_of,
};

/// Rounds to the nearest finite `R` and back; one unit per element.
#[cube(launch, address_type = "dynamic")]
pub(super) fn round_trip<R: Float>(data: &mut [f32], n: usize, #[define(R)] _dtype: ElemType) {
    if ABSOLUTE_POS < n {
        data[ABSOLUTE_POS] = f32::cast_from(R::cast_from(saturate(data[ABSOLUTE_POS])));
    }
}

/// Restores keys; one unit per element `[slices, tokens, head_dim]`.
#[cube(launch, address_type = "dynamic")]
pub(super) fn dequantize_keys(
    words: &[u32],
    out: &mut [f32],
    n: usize,
    tokens: usize,
    head_dim: usize,
    #[comptime] group_size: usize,
    #[comptime] n_bits: u32,
) {
    if ABSOLUTE_POS < n {
        let codes_per_word = comptime!(32 / n_bits as usize);
        let code_rows = comptime!(group_size / (32 / n_bits as usize));
        let channel = ABSOLUTE_POS % head_dim;
        let token = ABSOLUTE_POS / head_dim % tokens;
        let slice = ABSOLUTE_POS / head_dim / tokens;
        let group = slice * (tokens / group_size) + token / group_size;
        let base = group * (code_rows + 1) * head_dim + channel;
        let at = token % group_size;
        let word = words[base + at / codes_per_word * head_dim];
        let params = words[base + code_rows * head_dim];
        let code = code_at(word, at % codes_per_word, n_bits);
        out[ABSOLUTE_POS] = code * scale_of(params) + min_of(params);
    }
}

/// Restores values; one unit per element `[slices, tokens, head_dim]`.
#[cube(launch, address_type = "dynamic")]
pub(super) fn dequantize_values(
    words: &[u32],
    out: &mut [f32],
    n: usize,
    head_dim: usize,
    #[comptime] group_size: usize,
    #[comptime] n_bits: u32,
) {
    if ABSOLUTE_POS < n {
        let codes_per_word = comptime!(32 / n_bits as usize);
        let channel = ABSOLUTE_POS % head_dim;
        let token = ABSOLUTE_POS / head_dim;
        let n_words = head_dim / codes_per_word;
        let base = token * (n_words + head_dim / group_size);
        let word = words[base + channel / codes_per_word];
        let params = words[base + n_words + channel / group_size];
        let code = code_at(word, channel % codes_per_word, n_bits);
        out[ABSOLUTE_POS] = code * scale_of(params) + min_of(params);
    }
}

/// Quantizes and restores keys in place; one unit per (slice, group, channel).
#[cube(launch, address_type = "dynamic")]
pub(super) fn fake_quantize_keys(
    data: &mut [f32],
    n: usize,
    tokens: usize,
    head_dim: usize,
    skip: usize,
    groups: usize,
    #[comptime] group_size: usize,
    #[comptime] n_bits: u32,
) {
    if ABSOLUTE_POS < n {
        let base = key_group(ABSOLUTE_POS, tokens, head_dim, skip, groups, group_size);
        fake_quantize_group(data, base, head_dim, group_size, n_bits);
    }
}

/// Quantizes and restores values in place; one unit per (slice, token, group).
#[cube(launch, address_type = "dynamic")]
pub(super) fn fake_quantize_values(
    data: &mut [f32],
    n: usize,
    tokens: usize,
    head_dim: usize,
    skip: usize,
    #[comptime] group_size: usize,
    #[comptime] n_bits: u32,
) {
    if ABSOLUTE_POS < n {
        let base = value_group(ABSOLUTE_POS, tokens, head_dim, skip, group_size);
        fake_quantize_group(data, base, 1, group_size, n_bits);
    }
}

#[cube]
fn fake_quantize_group(
    data: &mut [f32],
    base: usize,
    stride: usize,
    #[comptime] group_size: usize,
    #[comptime] n_bits: u32,
) {
    let mut min = f32::new(F16_MAX);
    let mut max = f32::new(-F16_MAX);
    for i in 0..group_size {
        let x = saturate(data[base + i * stride]);
        min = lesser(min, x);
        max = greater(max, x);
    }
    let params = parameters(min, max, n_bits);
    let scale = scale_of(params);
    let min = min_of(params);
    for i in 0..group_size {
        let code = encode(data[base + i * stride], scale, min, n_bits);
        data[base + i * stride] = f32::cast_from(code) * scale + min;
    }
}

/// Adds to the gradient of keys what passes through their scales; one unit per (slice, group,
/// channel).
#[cube(launch, address_type = "dynamic")]
pub(super) fn scale_gradient_keys(
    data: &[f32],
    grad: &mut [f32],
    n: usize,
    tokens: usize,
    head_dim: usize,
    skip: usize,
    groups: usize,
    #[comptime] group_size: usize,
    #[comptime] n_bits: u32,
) {
    if ABSOLUTE_POS < n {
        let base = key_group(ABSOLUTE_POS, tokens, head_dim, skip, groups, group_size);
        add_scale_gradient(data, grad, base, head_dim, group_size, n_bits);
    }
}

/// Adds to the gradient of values what passes through their scales; one unit per (slice, token,
/// group).
#[cube(launch, address_type = "dynamic")]
pub(super) fn scale_gradient_values(
    data: &[f32],
    grad: &mut [f32],
    n: usize,
    tokens: usize,
    head_dim: usize,
    skip: usize,
    #[comptime] group_size: usize,
    #[comptime] n_bits: u32,
) {
    if ABSOLUTE_POS < n {
        let base = value_group(ABSOLUTE_POS, tokens, head_dim, skip, group_size);
        add_scale_gradient(data, grad, base, 1, group_size, n_bits);
    }
}

/// Adds `(sum grad * error) / n` to the gradient of the group's maximum and subtracts it from that
/// of its minimum: [`SteGradient::ScaleMin`](crate::SteGradient::ScaleMin).
#[cube]
fn add_scale_gradient(
    data: &[f32],
    grad: &mut [f32],
    base: usize,
    stride: usize,
    #[comptime] group_size: usize,
    #[comptime] n_bits: u32,
) {
    let max_code = comptime!(((1u32 << n_bits) - 1) as f32);
    let mut min = f32::new(F16_MAX);
    let mut max = f32::new(-F16_MAX);
    let mut lowest = base;
    let mut highest = base;
    for i in 0..group_size {
        let at = base + i * stride;
        let x = saturate(data[at]);
        if x < min {
            min = x;
            lowest = at;
        }
        if x > max {
            max = x;
            highest = at;
        }
    }
    let params = parameters(min, max, n_bits);
    let scale = scale_of(params);
    let min = min_of(params);
    if scale > 0.0f32 {
        let mut sum = f32::new(0.0);
        for i in 0..group_size {
            let at = base + i * stride;
            let code = f32::cast_from(encode(data[at], scale, min, n_bits));
            let error = code - (saturate(data[at]) - min) / scale;
            // A NaN has no rounding error.
            if !is_nan(data[at]) {
                sum += grad[at] * clamp(error, -0.5f32, 0.5f32);
            }
        }
        let sum = sum / max_code;
        grad[highest] += sum;
        grad[lowest] -= sum;
    }
}

/// Index of the first element of the group of keys that `unit` works on.
#[cube]
fn key_group(
    unit: usize,
    tokens: usize,
    head_dim: usize,
    skip: usize,
    groups: usize,
    #[comptime] group_size: usize,
) -> usize {
    let channel = unit % head_dim;
    let group = unit / head_dim % groups;
    let slice = unit / head_dim / groups;
    (slice * tokens + skip + group * group_size) * head_dim + channel
}

/// Index of the first element of the group of values that `unit` works on.
#[cube]
fn value_group(
    unit: usize,
    tokens: usize,
    head_dim: usize,
    skip: usize,
    #[comptime] group_size: usize,
) -> usize {
    let groups = head_dim / group_size;
    let grouped = tokens - skip;
    let group = unit % groups;
    let token = unit / groups % grouped;
    let slice = unit / groups / grouped;
    (slice * tokens + skip + token) * head_dim + group * group_size
}
