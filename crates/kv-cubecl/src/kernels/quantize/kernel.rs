use cubecl::prelude::*;

use crate::kernels::codec::{F16_MAX, code_at, encode, min_of, parameters, saturate, scale_of};

/// One unit per element `[slices, tokens, head_dim]`.
#[cube(launch)]
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

/// One unit per element `[slices, tokens, head_dim]`.
#[cube(launch)]
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

/// Replaces keys by what they restore to; one unit per (slice, group, channel).
#[cube(launch)]
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
        let channel = ABSOLUTE_POS % head_dim;
        let group = ABSOLUTE_POS / head_dim % groups;
        let slice = ABSOLUTE_POS / head_dim / groups;
        let base = (slice * tokens + skip + group * group_size) * head_dim + channel;
        fake_quantize_group(data, base, head_dim, group_size, n_bits);
    }
}

/// Replaces values by what they restore to; one unit per (slice, token, group).
#[cube(launch)]
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
        let groups = head_dim / group_size;
        let grouped = tokens - skip;
        let group = ABSOLUTE_POS % groups;
        let token = ABSOLUTE_POS / groups % grouped;
        let slice = ABSOLUTE_POS / groups / grouped;
        let base = (slice * tokens + skip + token) * head_dim + group * group_size;
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
        min = clamp_max(min, x);
        max = clamp_min(max, x);
    }
    let params = parameters(min, max, n_bits);
    let scale = scale_of(params);
    let min = min_of(params);
    for i in 0..group_size {
        let code = encode(data[base + i * stride], scale, min, n_bits);
        data[base + i * stride] = f32::cast_from(code) * scale + min;
    }
}
