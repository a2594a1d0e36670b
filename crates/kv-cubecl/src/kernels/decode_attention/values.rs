//! The weighted sum of the values of a tile.

use cubecl::prelude::*;

use super::{
    args::{CacheBuffers, DecodeArgs},
    base::{DecodeBlueprint, VALUES_AT_ONCE},
    rows::Rows,
    tiles::{Extent, Tile},
};
use crate::{
    formats::{
        QuantSpec,
        cube::{element, high_bits, low_word, offset, scale},
    },
    kernels::layout::{
        CacheArgs, SideArgs, factor_in, float_element, packed_slot, parameter_address, parameter_in,
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
        #[comptime]
        match comptime!(bp.specs.values) {
            Some(spec) => {
                if tile.windowed {
                    let base = slice * cache.values.slice_words;
                    let end = clamp_max(tile.end, cache.schedule.sinks + extent.packed_values);
                    let many = VALUES_AT_ONCE;
                    while token + (many - 1) * strides < end {
                        let first = Packed { base, token, start: tile.start };
                        add_packed(&buffers.values, &first, rows, cache, many, spec, bp);
                        token += many * strides;
                    }
                    while token < end {
                        let first = Packed { base, token, start: tile.start };
                        add_packed(&buffers.values, &first, rows, cache, 1usize, spec, bp);
                        token += strides;
                    }
                }
            }
            None => {}
        }
        while token < tile.end {
            let row = slice * cache.float_elements + float_element(token, &cache.values);
            add_float::<R, N>(&buffers.floats, row, token - tile.start, rows, bp);
            token += strides;
        }
    }
}

/// The first of the packed values that are added at once.
#[derive(CubeType)]
struct Packed {
    /// First word of the slice.
    base: usize,
    token: usize,
    /// First token of the tile.
    start: usize,
}

/// Adds packed values of `many` tokens, `strides` apart, with their weights. Scale and offset are
/// folded into the weights. All codes and parameters are loaded before the first value is added, so
/// that a unit waits once for memory.
#[cube]
fn add_packed(
    values: &[u32],
    first: &Packed,
    state: &mut Rows,
    cache: &CacheArgs,
    #[comptime] many: usize,
    #[comptime] spec: QuantSpec,
    #[comptime] bp: DecodeBlueprint,
) {
    let rows = comptime!(bp.rows);
    let unit_channels = comptime!(bp.unit_channels);
    let codes = comptime!(spec.codes_per_word());
    let words = comptime!(bp.unit_channels / spec.codes_per_word());
    let channel = state.block * unit_channels;
    let group = channel / spec.group_size;
    let first_run = channel % spec.group_size / codes;
    let tiled = comptime!(spec.tile.is_some());
    let mut low = Array::<u32>::new(comptime!(many * words));
    let mut high = Array::<u32>::new(comptime!(many * words));
    let mut parameters = Array::<u32>::new(many);
    let mut factors = Array::<usize>::new(many);
    #[unroll]
    for nth in 0..many {
        let mut slot = first.token + nth * comptime!(bp.strides()) - cache.schedule.sinks;
        if comptime!(bp.window) {
            slot = packed_slot(slot, &cache.values);
        }
        let head_dim = comptime!(bp.head_dim.values);
        let place = value_address(values, first.base, slot, group, &cache.values, head_dim, spec);
        let codes_of_group = place.line + group * comptime!(spec.code_words());
        parameters[nth] = place.parameter;
        factors[nth] = place.factors;
        #[unroll]
        for i in 0..words {
            let run = first_run + i;
            low[nth * words + i] = values[codes_of_group + low_word(run, spec)];
            high[nth * words + i] = high_bits(values, codes_of_group, 1usize, run, spec);
        }
    }
    let mut weights = Array::<f32>::new(rows);
    #[unroll]
    for nth in 0..many {
        let at = first.token + nth * comptime!(bp.strides()) - first.start;
        let scale = scale(parameters[nth], spec);
        let min = offset(parameters[nth], spec);
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
            load_factors(values, factors[nth], channel, state, bp);
        }
        #[unroll]
        for i in 0..words {
            #[unroll]
            for j in 0..codes {
                let at = comptime!(nth * words + i);
                let mut element = element(low[at], high[at], j, spec);
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
