//! Restores packed keys and values for the unit that reads them.

use cubecl::prelude::*;

use super::base::ChunkBlueprint;
use crate::{
    formats::{
        Granularity, QuantSpec,
        cube::{code_in, high_bits, high_shift, high_word, low_word, offset, restore, scale},
    },
    kernels::{
        decode_attention::{value_address, word_at},
        layout::{SideArgs, factor_in, parameter_address, parameter_in},
    },
};

/// Restores four channels of the packed keys of a unit's run of tokens to `run` `[unit_tokens, 4]`.
/// The run starts at `token`, counted after the sinks. Keys are packed in groups of tokens.
#[cube]
fn restore_groups<N: Size>(
    keys: &[Vector<u32, N>],
    slice_base: usize,
    token: usize,
    column: usize,
    run: &mut Array<f32>,
    #[comptime] spec: QuantSpec,
    #[comptime] bp: ChunkBlueprint,
) {
    let codes = comptime!(spec.codes_per_word());
    let width = comptime!(bp.blocks.head_dim.keys / 4);
    let group_lines = comptime!(spec.code_words());
    // A run consists of whole words, or is a part of one.
    let unit_lines = comptime!(bp.blocks.unit_tokens.div_ceil(spec.codes_per_word()));
    let line_codes = comptime!(bp.blocks.unit_tokens.min(spec.codes_per_word()));
    let block_lines = comptime!(spec.block_words(bp.blocks.head_dim.keys) / 4);
    let group_base = slice_base + token / spec.group_size * block_lines;
    let first_run = token % spec.group_size / codes;
    let first_code = token % codes;
    let params = keys[group_base + group_lines * width + column];
    let mut scales = Array::<f32>::new(4usize);
    let mut offsets = Array::<f32>::new(4usize);
    #[unroll]
    for k in 0..4usize {
        scales[k] = scale(params.extract(k), spec);
        offsets[k] = offset(params.extract(k), spec);
    }
    #[unroll]
    for i in 0..unit_lines {
        let line = keys[group_base + low_word(first_run + i, spec) * width + column];
        let mut high_line = line;
        if comptime!(spec.splits_codes()) {
            high_line = keys[group_base + high_word(first_run + i) * width + column];
        }
        #[unroll]
        for k in 0..4usize {
            let low = line.extract(k);
            let high = high_line.extract(k) >> high_shift(first_run + i);
            #[unroll]
            for j in 0..line_codes {
                let code = if comptime!(bp.blocks.unit_tokens < spec.codes_per_word()) {
                    code_in(low, high, first_code + j, spec)
                } else {
                    code_in(low, high, j, spec)
                };
                run[(i * line_codes + j) * 4 + k] = restore(code, scales[k], offsets[k], spec);
            }
        }
    }
    if comptime!(spec.tile.is_some()) {
        let key_dim = comptime!(bp.blocks.head_dim.keys);
        let factors = comptime!(spec.block_words(key_dim) - spec.factors(key_dim) / 2);
        #[unroll]
        for t in 0..comptime!(bp.blocks.unit_tokens) {
            let index = token % spec.group_size + t;
            let word = word_at::<N>(keys, group_base, factors + index / 2, 4usize);
            let factor = factor_in(word, index);
            #[unroll]
            for k in 0..4usize {
                run[t * 4 + k] *= factor;
            }
        }
    }
}

/// As [`restore_groups`], for keys that are each packed by itself, with parameters that share
/// words. The run ends before `end`.
#[cube]
fn restore_tokens<N: Size>(
    keys: &[Vector<u32, N>],
    slice_base: usize,
    token: usize,
    end: usize,
    column: usize,
    run: &mut Array<f32>,
    side: &SideArgs,
    #[comptime] spec: QuantSpec,
    #[comptime] bp: ChunkBlueprint,
) {
    let key_dim = comptime!(bp.blocks.head_dim.keys);
    let codes = comptime!(spec.codes_per_word());
    let group = column * 4 / spec.group_size;
    #[unroll]
    for t in 0..comptime!(bp.blocks.unit_tokens) {
        // Tokens past the end are read as the last one, and masked by the caller.
        let slot = clamp_max(token + t, end - 1);
        let place = parameter_address(slot, group, side.packed_tokens, key_dim, spec);
        let param = word_at::<N>(keys, slice_base, place.word, 4usize);
        let scale = scale(parameter_in(param, place.shift, spec), spec);
        let at = slot * comptime!(spec.words_of_codes(bp.blocks.head_dim.keys));
        let nth = column * 4 / codes;
        let low = word_at::<N>(keys, slice_base, at + low_word(nth, spec), 4usize);
        let mut high = low;
        if comptime!(spec.splits_codes()) {
            let word = word_at::<N>(keys, slice_base, at + high_word(nth), 4usize);
            high = word >> high_shift(nth);
        }
        #[unroll]
        for k in 0..4usize {
            let code = code_in(low, high, column * 4 % codes + k, spec);
            run[t * 4 + k] = restore(code, scale, f32::new(0.0), spec);
        }
    }
}

/// Restores four channels of the packed keys of a unit's run of tokens, `token..end`.
#[cube]
pub(super) fn restore_keys<N: Size>(
    keys: &[Vector<u32, N>],
    slice_base: usize,
    token: usize,
    end: usize,
    column: usize,
    run: &mut Array<f32>,
    side: &SideArgs,
    #[comptime] spec: QuantSpec,
    #[comptime] bp: ChunkBlueprint,
) {
    if comptime!(spec.granularity == Granularity::PerToken) {
        restore_tokens::<N>(keys, slice_base, token, end, column, run, side, spec, bp);
    } else {
        restore_groups::<N>(keys, slice_base, token, column, run, spec, bp);
    }
}

/// Restores a unit's channels of the value of a packed token to row `at` of `run`; `token` is
/// counted after the sinks.
#[cube]
pub(super) fn restore_value(
    values: &[u32],
    slice_base: usize,
    token: usize,
    block: usize,
    run: &mut Array<f32>,
    side: &SideArgs,
    #[comptime] at: usize,
    #[comptime] spec: QuantSpec,
    #[comptime] bp: ChunkBlueprint,
) {
    let codes = comptime!(spec.codes_per_word());
    let channels = comptime!(bp.blocks.unit_channels);
    let group = block * channels / spec.group_size;
    let head_dim = comptime!(bp.blocks.head_dim.values);
    let place = value_address(values, slice_base, token, group, side, head_dim, spec);
    let codes_of_group = place.line + group * comptime!(spec.code_words());
    let first_run = block * channels % spec.group_size / codes;
    let scale = scale(place.parameter, spec);
    let offset = offset(place.parameter, spec);
    let word_codes = comptime!(bp.blocks.unit_channels.min(spec.codes_per_word()));
    #[unroll]
    for i in 0..comptime!(bp.blocks.unit_channels.div_ceil(spec.codes_per_word())) {
        let low = values[codes_of_group + low_word(first_run + i, spec)];
        let high = high_bits(values, codes_of_group, 1usize, first_run + i, spec);
        #[unroll]
        for j in 0..word_codes {
            let code = if comptime!(bp.blocks.unit_channels < spec.codes_per_word()) {
                code_in(low, high, block * channels % codes + j, spec)
            } else {
                code_in(low, high, j, spec)
            };
            let mut restored = restore(code, scale, offset, spec);
            if comptime!(spec.tile.is_some()) {
                let channel = block * channels + i * word_codes + j;
                restored *= factor_in(values[place.factors + channel / 2], channel);
            }
            run[at * channels + i * word_codes + j] = restored;
        }
    }
}
