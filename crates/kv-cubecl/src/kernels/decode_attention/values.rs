//! The weighted sum of the values of a tile.

use cubecl::prelude::*;

use super::{
    args::DecodeArgs,
    base::DecodeBlueprint,
    kernel::{Extent, Tile},
    rows::Rows,
    score::element,
};
use crate::{
    formats::cube::PackedInKernels,
    kernels::layout::{float_element, packed_slot},
};

/// Adds to the unit's outputs its block of channels of every `strides`-th token.
#[cube]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
pub(super) fn add_values<R: Float, N: Size, V: PackedInKernels>(
    values: &[u32],
    floats: &[Vector<R, N>],
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
            if comptime!(bp.value_bits > 0) {
                packed = tile.windowed && token - cache.schedule.sinks < extent.packed_values;
                if packed {
                    let base = slice * cache.values.slice_words;
                    let mut slot = token - cache.schedule.sinks;
                    if comptime!(bp.window) {
                        slot = packed_slot(slot, &cache.values);
                    }
                    add_packed::<V>(values, base, slot, at, rows, bp);
                }
            }
            if !packed {
                let row = slice * cache.float_elements + float_element(token, &cache.values);
                add_float::<R, N>(floats, row, at, rows, bp);
            }
            token += strides;
        }
    }
}

/// Adds a packed value, in slot `token`, with the weights of token `at` of the tile. Scale and
/// offset are folded into the weights where elements are linear in their codes.
#[cube]
fn add_packed<V: PackedInKernels>(
    values: &[u32],
    slice_base: usize,
    token: usize,
    at: usize,
    state: &mut Rows,
    #[comptime] bp: DecodeBlueprint,
) {
    let rows = comptime!(bp.rows);
    let unit_channels = comptime!(bp.unit_channels);
    let codes = comptime!(bp.value_codes());
    let n_words = comptime!(bp.head_dim.values / bp.value_codes());
    let line_len =
        comptime!(bp.head_dim.values / bp.value_codes() + bp.head_dim.values / bp.group_size);
    let line = slice_base + token * line_len;
    let param = values[line + n_words + state.block * unit_channels / bp.group_size];
    let scale = V::scale(param);
    let min = V::offset(param);
    let mut weights = Array::<f32>::new(rows);
    #[unroll]
    for r in 0..rows {
        let weight = state.scratch[r * comptime!(bp.tile()) + at];
        if comptime!(V::LINEAR) {
            weights[r] = weight * scale;
            state.offsets[r] += weight * min;
        } else {
            weights[r] = weight;
        }
    }
    #[unroll]
    for i in 0..comptime!(bp.unit_channels / bp.value_codes()) {
        let word = values[line + state.block * (unit_channels / codes) + i];
        #[unroll]
        for j in 0..codes {
            let element = element::<V>(word, j, scale, min, bp.value_bits);
            #[unroll]
            for r in 0..rows {
                state.outputs[r * unit_channels + i * codes + j] += weights[r] * element;
            }
        }
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
