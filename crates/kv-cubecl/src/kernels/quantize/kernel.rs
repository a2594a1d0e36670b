use cubecl::prelude::*;

use crate::{
    formats::{
        Granularity, QuantSpec,
        cube::{
            add_scale_gradient, code_in, encode, greater, high_bits, lesser, limited, low_word,
            offset, parameter, parameter_of_norm, restore, root_mean_square, saturate, scale,
            square, value,
        },
    },
    kernels::layout::{block_words, factor_in, group_words, parameter_address, parameter_in},
};

/// Rounds to the nearest `R` and back; one unit per element.
#[cube(launch, address_type = "dynamic")]
pub(super) fn round_trip<R: Float>(
    data: &mut [f32],
    n: usize,
    #[comptime] saturating: bool,
    #[define(R)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < n {
        let mut x = data[ABSOLUTE_POS];
        if comptime!(saturating) {
            x = saturate(x);
        }
        data[ABSOLUTE_POS] = f32::cast_from(R::cast_from(x));
    }
}

/// Restores packed tokens; one unit per element `[slices, tokens, head_dim]`.
#[cube(launch, address_type = "dynamic")]
pub(super) fn dequantize(
    words: &[u32],
    out: &mut [f32],
    n: usize,
    tokens: usize,
    slice_words: usize,
    head_dim: usize,
    #[comptime] spec: QuantSpec,
) {
    if ABSOLUTE_POS < n {
        let group_size = comptime!(spec.group_size);
        let codes_per_word = comptime!(spec.codes_per_word());
        let code_words = comptime!(spec.code_words());
        let channel = ABSOLUTE_POS % head_dim;
        // Slices are whole blocks of tokens.
        let token = ABSOLUTE_POS / head_dim;
        let block = token / comptime!(spec.block_tokens());
        let mut groups = head_dim;
        let mut group = channel;
        let mut at = token % group_size;
        // The first word of the group's codes, and the distance to the next.
        let mut word = channel;
        let mut stride = head_dim;
        if comptime!(spec.granularity == Granularity::PerToken) {
            groups = head_dim / group_size;
            group = channel / group_size;
            at = channel % group_size;
            word = group * code_words;
            stride = 1usize;
        }
        let first_of_block = block * block_words(head_dim, spec);
        let mut base = first_of_block;
        if comptime!(spec.granularity == Granularity::PerToken) {
            base += token % comptime!(spec.block_tokens()) * groups * (code_words + 1);
        }
        let param = if comptime!(spec.packs_parameters()) {
            let first = token / tokens * slice_words;
            let slot = token % tokens;
            base = first + slot * groups * code_words;
            let place = parameter_address(slot, group, tokens, head_dim, spec);
            parameter_in(words[first + place.word], place.shift, spec)
        } else {
            words[base + groups * code_words + group]
        };
        let run = at / codes_per_word;
        let low = words[base + word + low_word(run, spec) * stride];
        let high = high_bits(words, base + word, stride, run, spec);
        let code = code_in(low, high, at % codes_per_word, spec);
        let mut restored = restore(code, scale(param, spec), offset(param, spec), spec);
        if comptime!(spec.tile.is_some()) {
            let mut index = channel;
            if comptime!(spec.granularity == Granularity::PerChannel) {
                index = token % comptime!(spec.block_tokens());
            }
            let factors = first_of_block + group_words(head_dim, spec);
            restored *= factor_in(words[factors + index / 2], index);
        }
        out[ABSOLUTE_POS] = restored;
    }
}

/// Range of the tokens in `[slices, tokens, head_dim]` that are quantized and restored.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Restored {
    pub(super) tokens: usize,
    pub(super) head_dim: usize,
    /// First tokens of a slice that stay as they are.
    pub(super) skip: usize,
    /// Number of token blocks in a slice.
    pub(super) blocks: usize,
}

/// The first element of a unit's group, and the distance to the next; one unit per (slice,
/// block_tokens, group).
#[cube]
fn group_of(unit: usize, restored: &Restored, #[comptime] spec: QuantSpec) -> (usize, usize) {
    let head_dim = restored.head_dim;
    let mut groups = head_dim;
    let mut width = 1usize;
    let mut stride = head_dim;
    if comptime!(spec.granularity == Granularity::PerToken) {
        groups = head_dim / spec.group_size;
        width = comptime!(spec.group_size);
        stride = 1usize;
    }
    let row = unit / groups;
    let token = restored.skip + row % restored.blocks * comptime!(spec.block_tokens());
    let first = row / restored.blocks * restored.tokens + token;
    (first * head_dim + unit % groups * width, stride)
}

/// Quantizes and restores each group in place; one unit per (slice, block_tokens, group).
#[cube(launch, address_type = "dynamic")]
pub(super) fn fake_quantize(
    data: &mut [f32],
    n: usize,
    restored: Restored,
    #[comptime] spec: QuantSpec,
) {
    if ABSOLUTE_POS < n {
        let group = group_of(ABSOLUTE_POS, &restored, spec);
        fake_quantize_group(data, group.0, group.1, spec);
    }
}

#[cube]
fn fake_quantize_group(data: &mut [f32], base: usize, stride: usize, #[comptime] spec: QuantSpec) {
    let group_size = comptime!(spec.group_size);
    let mut min = f32::new(comptime!(spec.format.limit()));
    let mut max = f32::new(comptime!(-spec.format.limit()));
    let mut squares = f32::new(0.0);
    for i in 0..group_size {
        let x = limited(data[base + i * stride], spec);
        if comptime!(spec.format.scales_by_norm()) {
            squares += square(x);
        } else {
            min = lesser(min, x);
            max = greater(max, x);
        }
    }
    if comptime!(spec.format.scales_by_norm()) {
        let rms = root_mean_square(squares, spec);
        let mut of_codes = f32::new(0.0);
        for i in 0..group_size {
            let code = encode(data[base + i * stride], rms, f32::new(0.0), spec);
            data[base + i * stride] = value(code, spec);
            of_codes += square(value(code, spec));
        }
        let scale = scale(parameter_of_norm(rms, of_codes, spec), spec);
        for i in 0..group_size {
            data[base + i * stride] *= scale;
        }
    } else {
        let param = parameter(min, max, spec);
        let (scale, offset) = (scale(param, spec), offset(param, spec));
        for i in 0..group_size {
            let code = encode(data[base + i * stride], scale, offset, spec);
            data[base + i * stride] = restore(code, scale, offset, spec);
        }
    }
}

/// Adds what passes through the scales; one unit per (slice, block_tokens, group).
#[cube(launch, address_type = "dynamic")]
pub(super) fn scale_gradient(
    data: &[f32],
    grad: &mut [f32],
    n: usize,
    restored: Restored,
    #[comptime] spec: QuantSpec,
) {
    if ABSOLUTE_POS < n {
        let group = group_of(ABSOLUTE_POS, &restored, spec);
        add_scale_gradient(data, grad, group.0, group.1, spec);
    }
}
