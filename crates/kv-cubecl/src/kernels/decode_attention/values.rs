//! The weighted sum of the values of a tile.

use cubecl::prelude::*;

use super::{
    args::{CacheBuffers, DecodeArgs},
    base::DecodeBlueprint,
    rows::Rows,
    tiles::{Extent, Tile},
};
use crate::{
    formats::{
        QuantSpec,
        cube::{element, high_bits, low_word, offset, scale},
    },
    kernels::layout::{
        SideArgs, factor_in, float_element, packed_slot, parameter_address, parameter_in,
    },
};

/// Adds to the unit's outputs its block of channels of every `strides`-th token.
#[cube]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
pub(super) fn add_values<R: Float, N: Size>(
    buffers: &CacheBuffers<R, N>,
    slice: usize,
    tile: &Tile,
    extent: &Extent,
    rows: &mut Rows,
    args: &DecodeArgs,
    #[comptime] bp: DecodeBlueprint,
) {
    let cache = &args.cache;
    let strides = comptime!(bp.strides());
    if rows.stride < strides {
        let mut token = tile.start + rows.stride;
        if comptime!(bp.window) {
            // What is hidden is left out: its weight is 0, but 0 times infinity is not 0.
            while token < tile.begin {
                token += strides;
            }
        }
        while token < tile.end {
            let at = token - tile.start;
            let mut packed = false;
            let spec = comptime!(bp.specs.values);
            #[comptime]
            match spec {
                Some(spec) => {
                    packed = tile.windowed && token - cache.schedule.sinks < extent.packed_values;
                    if packed {
                        let base = slice * cache.values.slice_words;
                        let mut slot = token - cache.schedule.sinks;
                        if comptime!(bp.window) {
                            slot = packed_slot(slot, &cache.values);
                        }
                        add_packed(&buffers.values, base, slot, at, rows, &cache.values, spec, bp);
                    }
                }
                None => {}
            }
            if !packed {
                let row = slice * cache.float_elements + float_element(token, &cache.values);
                add_float::<R, N>(&buffers.floats, row, at, rows, bp);
            }
            token += strides;
        }
    }
}

/// Adds a packed value, in slot `token`, with the weights of token `at` of the tile. Scale and
/// offset are folded into the weights.
#[cube]
fn add_packed(
    values: &[u32],
    slice_base: usize,
    token: usize,
    at: usize,
    state: &mut Rows,
    side: &SideArgs,
    #[comptime] spec: QuantSpec,
    #[comptime] bp: DecodeBlueprint,
) {
    let rows = comptime!(bp.rows);
    let unit_channels = comptime!(bp.unit_channels);
    let codes = comptime!(spec.codes_per_word());
    let channel = state.block * unit_channels;
    let group = channel / spec.group_size;
    let place = value_address(values, slice_base, token, group, side, bp.head_dim.values, spec);
    let codes_of_group = place.line + group * comptime!(spec.code_words());
    let first_run = channel % spec.group_size / codes;
    let scale = scale(place.parameter, spec);
    let min = offset(place.parameter, spec);
    let tiled = comptime!(spec.tile.is_some());
    let mut weights = Array::<f32>::new(rows);
    #[unroll]
    for r in 0..rows {
        let weight = state.scratch[r * comptime!(bp.tile()) + at];
        if comptime!(tiled) {
            weights[r] = weight;
        } else {
            weights[r] = weight * scale;
            if comptime!(spec.format.has_offset()) {
                state.offsets[r] += weight * min;
            }
        }
    }
    if comptime!(tiled) {
        load_factors(values, place.factors, channel, state, bp);
    }
    #[unroll]
    for i in 0..comptime!(bp.unit_channels / spec.codes_per_word()) {
        let low = values[codes_of_group + low_word(first_run + i, spec)];
        let high = high_bits(values, codes_of_group, 1usize, first_run + i, spec);
        #[unroll]
        for j in 0..codes {
            let mut element = element(low, high, j, spec);
            if comptime!(tiled) {
                element = (element * scale + min) * state.factors[i * codes + j];
            }
            #[unroll]
            for r in 0..rows {
                state.outputs[r * unit_channels + i * codes + j] += weights[r] * element;
            }
        }
    }
}

/// Loads the factors of the unit's channels, if they are of another tile than the last ones.
/// `factors` is the first word of the tile's factors.
#[cube]
fn load_factors(
    values: &[u32],
    factors: usize,
    channel: usize,
    state: &mut Rows,
    #[comptime] bp: DecodeBlueprint,
) {
    if state.factors_from[0] != factors as u32 {
        state.factors_from[0] = factors as u32;
        #[unroll]
        for i in 0..comptime!(bp.unit_channels / 2) {
            let word = values[factors + channel / 2 + i];
            state.factors[2 * i] = factor_in(word, 0usize);
            state.factors[2 * i + 1] = factor_in(word, 1usize);
        }
    }
}

/// The words of the packed value in a slot.
#[derive(CubeType)]
pub(crate) struct ValueAddress {
    /// First word of its codes.
    pub(crate) line: usize,
    /// Parameter of one of its groups.
    pub(crate) parameter: u32,
    /// First word of the factors of its tile, if it is in one.
    pub(crate) factors: usize,
}

/// The words of the packed value in a slot, of a slice that begins at word `base`, and the
/// parameter of a group.
#[cube]
pub(crate) fn value_address(
    values: &[u32],
    base: usize,
    slot: usize,
    group: usize,
    side: &SideArgs,
    #[comptime] head_dim: usize,
    #[comptime] spec: QuantSpec,
) -> ValueAddress {
    let n_words = comptime!(spec.words_of_codes(head_dim));
    if comptime!(spec.packs_parameters()) {
        let place = parameter_address(slot, group, side.packed_tokens, head_dim, spec);
        let parameter = parameter_in(values[base + place.word], place.shift, spec);
        ValueAddress { line: base + slot * n_words, parameter, factors: base }
    } else {
        let block_tokens = comptime!(spec.block_tokens());
        let block = base + slot / block_tokens * comptime!(spec.block_words(head_dim));
        let line_words = comptime!(head_dim / spec.group_size * spec.words_per_group());
        let line = block + slot % block_tokens * line_words;
        let factors = block + block_tokens * line_words;
        ValueAddress { line, parameter: values[line + n_words + group], factors }
    }
}

/// Adds a value in float, whose row starts at element `row`.
#[cube]
fn add_float<R: Float, N: Size>(
    floats: &[Vector<R, N>],
    row: usize,
    at: usize,
    state: &mut Rows,
    #[comptime] bp: DecodeBlueprint,
) {
    let unit_channels = comptime!(bp.unit_channels);
    let vectors = comptime!(bp.unit_channels / bp.vector);
    let line = row / comptime!(bp.vector) + state.block * vectors;
    #[unroll]
    for i in 0..vectors {
        let value = floats[line + i];
        #[unroll]
        for k in 0..comptime!(bp.vector) {
            let channel = f32::cast_from(value.extract(k));
            #[unroll]
            for r in 0..comptime!(bp.rows) {
                let weight = state.scratch[r * comptime!(bp.tile()) + at];
                state.outputs[r * unit_channels + i * bp.vector + k] += weight * channel;
            }
        }
    }
}
