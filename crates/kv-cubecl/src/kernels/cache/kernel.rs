use cubecl::prelude::*;

use crate::kernels::{
    codec::{F16_MAX, encode, greater, lesser, min_of, parameters, saturate, scale_of},
    window::{WindowArgs, quantized_keys, quantized_values},
};

/// Where to read a token's float row: from the cache's ring, or from the chunk that is being
/// appended.
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

/// One channel of a token past the sinks, rounded to the stored type and saturated to the range of
/// f16.
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
        // Without saturation the conversion to a narrower type could overflow to infinity. For f32
        // it makes no difference, as the result is saturated anyway.
        f32::cast_from(R::cast_from(saturate(chunk[row * source.head_dim + channel])))
    };
    saturate(x)
}

/// Quantizes one channel of a group of keys into its words.
#[cube]
fn flush_key<R: Float>(
    floats: &[R],
    chunk: &[f32],
    words: &mut [u32],
    slice: usize,
    group: usize,
    channel: usize,
    slice_words: usize,
    source: &Source,
    #[comptime] group_size: usize,
    #[comptime] n_bits: u32,
) {
    let codes_per_word = comptime!(32 / n_bits as usize);
    let code_rows = comptime!(group_size / (32 / n_bits as usize));
    let head_dim = source.head_dim;
    let token = source.sinks + group * group_size;
    let mut min = f32::new(F16_MAX);
    let mut max = f32::new(-F16_MAX);
    for i in 0..group_size {
        let x = read::<R>(floats, chunk, slice, token + i, channel, source);
        min = lesser(min, x);
        max = greater(max, x);
    }
    let params = parameters(min, max, n_bits);
    let scale = scale_of(params);
    let min = min_of(params);
    let base = slice * slice_words + group * (code_rows + 1) * head_dim + channel;
    for line in 0..code_rows {
        let mut word = 0u32;
        for i in 0..codes_per_word {
            let at = token + line * codes_per_word + i;
            let x = read::<R>(floats, chunk, slice, at, channel, source);
            word |= encode(x, scale, min, n_bits) << (i as u32 * n_bits);
        }
        words[base + line * head_dim] = word;
    }
    words[base + code_rows * head_dim] = params;
}

/// Quantizes one group of a token's values into its words; `index` counts the token after the
/// sinks.
#[cube]
fn flush_value<R: Float>(
    floats: &[R],
    chunk: &[f32],
    words: &mut [u32],
    slice: usize,
    index: usize,
    group: usize,
    slice_words: usize,
    source: &Source,
    #[comptime] group_size: usize,
    #[comptime] n_bits: u32,
) {
    let codes_per_word = comptime!(32 / n_bits as usize);
    let group_words = comptime!(group_size / (32 / n_bits as usize));
    let groups = source.head_dim / group_size;
    let token = source.sinks + index;
    let channel = group * group_size;
    let mut min = f32::new(F16_MAX);
    let mut max = f32::new(-F16_MAX);
    for i in 0..group_size {
        let x = read::<R>(floats, chunk, slice, token, channel + i, source);
        min = lesser(min, x);
        max = greater(max, x);
    }
    let params = parameters(min, max, n_bits);
    let scale = scale_of(params);
    let min = min_of(params);
    let base = slice * slice_words + index * groups * (group_words + 1);
    for at in 0..group_words {
        let mut word = 0u32;
        for i in 0..codes_per_word {
            let at = channel + at * codes_per_word + i;
            let x = read::<R>(floats, chunk, slice, token, at, source);
            word |= encode(x, scale, min, n_bits) << (i as u32 * n_bits);
        }
        words[base + group * group_words + at] = word;
    }
    words[base + groups * group_words + group] = params;
}

/// Stores one element of the chunk, unless its token is between the sinks and `first_float` and so is
/// packed already. Rows narrower than f32 saturate.
#[cube]
fn store<R: Float>(
    chunk: &[f32],
    floats: &mut [R],
    slice: usize,
    token: usize,
    channel: usize,
    first_float: usize,
    source: &Source,
    #[comptime] saturating: bool,
) {
    if token < source.sinks || token >= first_float {
        let from = slice * source.added + token - source.len;
        let to = slice * source.float_rows + row_of(token, source);
        let x = chunk[from * source.head_dim + channel];
        if comptime!(saturating) {
            floats[to * source.head_dim + channel] = R::cast_from(saturate(x));
        } else {
            floats[to * source.head_dim + channel] = R::cast_from(x);
        }
    }
}

/// Quantizes the groups of keys that leave the window; one unit per (slice, group, channel).
#[cube(launch, address_type = "dynamic")]
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
        let channel = ABSOLUTE_POS % source.head_dim;
        let row = ABSOLUTE_POS / source.head_dim;
        let group = first_group + row % groups;
        flush_key::<R>(
            floats,
            chunk,
            words,
            row / groups,
            group,
            channel,
            slice_words,
            &source,
            group_size,
            n_bits,
        );
    }
}

/// Quantizes the values that leave the window; one unit per (slice, token, group).
#[cube(launch, address_type = "dynamic")]
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
        let groups = source.head_dim / group_size;
        let row = ABSOLUTE_POS / groups;
        let index = first_token + row % tokens;
        flush_value::<R>(
            floats,
            chunk,
            words,
            row / tokens,
            index,
            ABSOLUTE_POS % groups,
            slice_words,
            &source,
            group_size,
            n_bits,
        );
    }
}

/// Stores one side of the chunk, one unit per (slice, token, channel).
#[cube(launch, address_type = "dynamic")]
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
        let channel = ABSOLUTE_POS % source.head_dim;
        let row = ABSOLUTE_POS / source.head_dim;
        let token = source.len + row % source.added;
        let slice = row / source.added;
        store::<R>(chunk, floats, slice, token, channel, first_float, &source, saturating);
    }
}

/// What changes the generated code of [`write_token`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct TokenBlueprint {
    /// Elements per group.
    pub(super) group_size: usize,
    /// Bits of packed keys, 0 if keys are in float.
    pub(super) key_bits: u32,
    /// Bits of packed values, 0 if values are in float.
    pub(super) value_bits: u32,
    /// Whether rows are narrower than f32.
    pub(super) saturating: bool,
}

impl TokenBlueprint {
    /// Channels of the new value that one unit stores: the group that it quantizes, or one.
    pub(super) const fn run(&self) -> usize {
        if self.value_bits == 0 { 1 } else { self.group_size }
    }
}

/// Run-time numbers of [`write_token`].
#[derive(CubeType, CubeLaunch)]
pub(super) struct TokenArgs {
    pub(super) keys: Source,
    pub(super) values: Source,
    pub(super) window: WindowArgs,
    pub(super) capacity: usize,
    /// Most groups of keys of a slice that this token may push out of the window, at least 1.
    pub(super) key_groups: usize,
    pub(super) key_slice_words: usize,
    pub(super) value_slice_words: usize,
    /// Units that work on keys; those that follow work on values.
    pub(super) n_keys: usize,
    /// Units that work on either side.
    pub(super) n: usize,
}

/// A copy of `source` for a cache of `len` tokens.
#[cube]
fn source_at(len: usize, source: &Source) -> Source {
    Source {
        len,
        added: source.added,
        sinks: source.sinks,
        ring: source.ring,
        first_row: source.first_row,
        float_rows: source.float_rows,
        head_dim: source.head_dim,
    }
}

/// Appends the key and the value of one token and quantizes all that leaves the window for it: one
/// unit per (slice, group of keys that may leave, channel), then one per (slice, group of the
/// value).
///
/// The cache holds as many tokens as `position` says or, without it, `args.keys.len`; if it is
/// full, nothing is written. The new token may take the slot of a token that leaves. The same unit
/// then reads the old row and writes the new one: among keys, that slot can only be in the first
/// group that leaves.
#[cube(launch, address_type = "dynamic")]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
pub(super) fn write_token<R: Float>(
    key: &[f32],
    value: &[f32],
    floats: &mut [R],
    key_words: &mut [u32],
    value_words: &mut [u32],
    position: ComptimeOption<Box<[i32]>>,
    args: TokenArgs,
    #[comptime] bp: TokenBlueprint,
    #[define(R)] _dtype: ElemType,
) {
    #[comptime]
    let len = match position {
        ComptimeOption::Some(position) => position[0] as usize,
        ComptimeOption::None => args.keys.len,
    };
    let head_dim = args.keys.head_dim;
    if len < args.capacity && ABSOLUTE_POS < args.n_keys {
        let source = source_at(len, &args.keys);
        let before = quantized_keys(len, &args.window);
        let after = quantized_keys(len + 1, &args.window);
        let row = ABSOLUTE_POS / head_dim;
        let slice = row / args.key_groups;
        let index = row % args.key_groups;
        let channel = ABSOLUTE_POS % head_dim;
        if comptime!(bp.key_bits > 0) {
            if index < (after - before) / bp.group_size {
                flush_key::<R>(
                    &*floats,
                    key,
                    key_words,
                    slice,
                    before / bp.group_size + index,
                    channel,
                    args.key_slice_words,
                    &source,
                    bp.group_size,
                    bp.key_bits,
                );
            }
        }
        if index == 0 {
            let first = args.window.sinks + after;
            store::<R>(key, floats, slice, len, channel, first, &source, bp.saturating);
        }
    } else if len < args.capacity && ABSOLUTE_POS < args.n {
        let source = source_at(len, &args.values);
        let before = quantized_values(len, &args.window);
        let after = quantized_values(len + 1, &args.window);
        let unit = ABSOLUTE_POS - args.n_keys;
        let runs = head_dim / comptime!(bp.run());
        let slice = unit / runs;
        if comptime!(bp.value_bits > 0) {
            if after > before {
                flush_value::<R>(
                    &*floats,
                    value,
                    value_words,
                    slice,
                    before,
                    unit % runs,
                    args.value_slice_words,
                    &source,
                    bp.group_size,
                    bp.value_bits,
                );
            }
        }
        let start = unit % runs * comptime!(bp.run());
        let first = args.window.sinks + after;
        for i in 0..comptime!(bp.run()) {
            store::<R>(value, floats, slice, len, start + i, first, &source, bp.saturating);
        }
    }
}
