use cubecl::prelude::*;

use crate::kernels::codec::{F16_MAX, encode, min_of, parameters, saturate, scale_of};

/// Where a token's float row is: in its ring, or in the chunk that is being appended.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Source {
    /// Tokens in the cache before the chunk.
    pub(super) len: usize,
    /// Tokens of the chunk.
    pub(super) added: usize,
    pub(super) sinks: usize,
    pub(super) ring: usize,
    /// First float row of this side.
    pub(super) first_row: usize,
    /// Float rows of one slice.
    pub(super) float_rows: usize,
    pub(super) head_dim: usize,
}

/// Float row of `token`.
#[cube]
fn row_of(token: usize, source: &Source) -> usize {
    let mut row = token;
    if token >= source.sinks {
        row = source.sinks + (token - source.sinks) % source.ring;
    }
    source.first_row + row
}

/// One channel of a token past the sinks, rounded to the stored type and saturated.
#[cube]
fn read<R: Float>(
    floats: &[R],
    chunk: &[f32],
    slice: usize,
    token: usize,
    channel: usize,
    source: &Source,
) -> f32 {
    let x = if token < source.len {
        let row = slice * source.float_rows + row_of(token, source);
        f32::cast_from(floats[row * source.head_dim + channel])
    } else {
        let row = slice * source.added + token - source.len;
        // Saturating first keeps a narrower type finite; the quantizer saturates anyway.
        f32::cast_from(R::cast_from(saturate(chunk[row * source.head_dim + channel])))
    };
    saturate(x)
}

/// One unit per (slice, group, channel).
#[cube(launch)]
pub(super) fn flush_keys<R: Float>(
    floats: &[R],
    chunk: &[f32],
    words: &mut [u32],
    source: Source,
    n: usize,
    first_group: usize,
    groups: usize,
    slice_words: usize,
    #[comptime] group_size: usize,
    #[comptime] n_bits: u32,
    #[define(R)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < n {
        let codes_per_word = comptime!(32 / n_bits as usize);
        let code_rows = comptime!(group_size / (32 / n_bits as usize));
        let head_dim = source.head_dim;
        let channel = ABSOLUTE_POS % head_dim;
        let group = first_group + ABSOLUTE_POS / head_dim % groups;
        let slice = ABSOLUTE_POS / head_dim / groups;
        let token = source.sinks + group * group_size;
        let mut min = f32::new(F16_MAX);
        let mut max = f32::new(-F16_MAX);
        for i in 0..group_size {
            let x = read::<R>(floats, chunk, slice, token + i, channel, &source);
            min = clamp_max(min, x);
            max = clamp_min(max, x);
        }
        let params = parameters(min, max, n_bits);
        let scale = scale_of(params);
        let min = min_of(params);
        let base = slice * slice_words + group * (code_rows + 1) * head_dim + channel;
        for line in 0..code_rows {
            let mut word = 0u32;
            for i in 0..codes_per_word {
                let at = token + line * codes_per_word + i;
                let x = read::<R>(floats, chunk, slice, at, channel, &source);
                word |= encode(x, scale, min, n_bits) << (i as u32 * n_bits);
            }
            words[base + line * head_dim] = word;
        }
        words[base + code_rows * head_dim] = params;
    }
}

/// One unit per (slice, token, group).
#[cube(launch)]
pub(super) fn flush_values<R: Float>(
    floats: &[R],
    chunk: &[f32],
    words: &mut [u32],
    source: Source,
    n: usize,
    first_token: usize,
    tokens: usize,
    slice_words: usize,
    #[comptime] group_size: usize,
    #[comptime] n_bits: u32,
    #[define(R)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < n {
        let codes_per_word = comptime!(32 / n_bits as usize);
        let group_words = comptime!(group_size / (32 / n_bits as usize));
        let groups = source.head_dim / group_size;
        let group = ABSOLUTE_POS % groups;
        let index = first_token + ABSOLUTE_POS / groups % tokens;
        let slice = ABSOLUTE_POS / groups / tokens;
        let token = source.sinks + index;
        let channel = group * group_size;
        let mut min = f32::new(F16_MAX);
        let mut max = f32::new(-F16_MAX);
        for i in 0..group_size {
            let x = read::<R>(floats, chunk, slice, token, channel + i, &source);
            min = clamp_max(min, x);
            max = clamp_min(max, x);
        }
        let params = parameters(min, max, n_bits);
        let scale = scale_of(params);
        let min = min_of(params);
        let base = slice * slice_words + index * groups * (group_words + 1);
        for at in 0..group_words {
            let mut word = 0u32;
            for i in 0..codes_per_word {
                let at = channel + at * codes_per_word + i;
                let x = read::<R>(floats, chunk, slice, token, at, &source);
                word |= encode(x, scale, min, n_bits) << (i as u32 * n_bits);
            }
            words[base + group * group_words + at] = word;
        }
        words[base + groups * group_words + group] = params;
    }
}

/// Stores one side of the chunk, one unit per (slice, token, channel); tokens between the sinks and
/// `first_float` are packed already. Rows narrower than f32 saturate.
#[cube(launch)]
pub(super) fn append<R: Float>(
    chunk: &[f32],
    floats: &mut [R],
    source: Source,
    n: usize,
    first_float: usize,
    #[comptime] saturating: bool,
    #[define(R)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < n {
        let head_dim = source.head_dim;
        let channel = ABSOLUTE_POS % head_dim;
        let token = source.len + ABSOLUTE_POS / head_dim % source.added;
        let slice = ABSOLUTE_POS / head_dim / source.added;
        if token < source.sinks || token >= first_float {
            let row = slice * source.float_rows + row_of(token, &source);
            let x = chunk[ABSOLUTE_POS];
            if comptime!(saturating) {
                floats[row * head_dim + channel] = R::cast_from(saturate(x));
            } else {
                floats[row * head_dim + channel] = R::cast_from(x);
            }
        }
    }
}
