//! Scores of the run of consecutive tokens that a unit works on.

use cubecl::prelude::*;

use super::{
    args::DecodeArgs,
    base::DecodeBlueprint,
    kernel::Tile,
    rows::{Rows, zeros},
};
use crate::{
    formats::cube::{PackedInKernels, code_at},
    kernels::{
        layout::{SideArgs, float_element, packed_slot},
        scores::softcap,
    },
};

/// The scores of the tokens of a tile that the unit works on, `[rows, unit_tokens]`; those past the end of the
/// tile are to be masked.
#[cube]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
pub(super) fn score<R: Float, N: Size, K: PackedInKernels>(
    keys: &[Vector<u32, N>],
    floats: &[Vector<R, N>],
    slice: usize,
    tile: &Tile,
    rows: &Rows,
    args: &DecodeArgs,
    #[comptime] bp: DecodeBlueprint,
) -> Array<f32> {
    let cache = &args.cache;
    let token = tile.start + rows.unit / bp.lanes * bp.unit_tokens;
    let mut scores = zeros(comptime!(bp.rows * bp.unit_tokens));
    if token < tile.end {
        if comptime!(bp.key_bits > 0) {
            if tile.packed {
                let base = slice * cache.keys.slice_words / comptime!(bp.vector);
                let mut token = token - cache.schedule.sinks;
                if comptime!(bp.window) {
                    token = packed_slot(token, &cache.keys);
                }
                score_packed::<N, K>(keys, base, token, rows.lane, &rows.query, &mut scores, bp);
            }
        }
        if !tile.packed {
            score_float::<R, N>(
                floats,
                slice * cache.float_elements,
                token,
                tile.end,
                rows.lane,
                &rows.query,
                &mut scores,
                &cache.keys,
                bp,
            );
        }
    }
    if comptime!(bp.lanes > 1) {
        #[unroll]
        for i in 0..comptime!(bp.rows * bp.unit_tokens) {
            #[unroll]
            for step in 0..comptime!(bp.lanes.trailing_zeros()) {
                scores[i] += plane_shuffle_xor(scores[i], 1u32 << step);
            }
        }
    }
    if comptime!(bp.softcap) {
        #[unroll]
        for i in 0..comptime!(bp.rows * bp.unit_tokens) {
            scores[i] = softcap(scores[i], args.softcap);
        }
    }
    scores
}

/// Adds to `scores` `[rows, unit_tokens]` the products of the query with the packed keys of a
/// unit's run of tokens, over the unit's share of the channels. The run starts at `token`, counted
/// after the sinks.
///
/// Scale and offset are folded into the query once per channel, not once per code, where elements are linear
/// in their codes; else each code is restored.
#[cube]
fn score_packed<N: Size, K: PackedInKernels>(
    keys: &[Vector<u32, N>],
    slice_base: usize,
    token: usize,
    lane: usize,
    query: &Shared<[f32]>,
    scores: &mut Array<f32>,
    #[comptime] bp: DecodeBlueprint,
) {
    let rows = comptime!(bp.rows);
    let unit_tokens = comptime!(bp.unit_tokens);
    let width = comptime!(bp.head_dim.keys / bp.vector);
    let codes = comptime!(bp.key_codes());
    let group_lines = comptime!(bp.group_size / bp.key_codes());
    let unit_lines = comptime!(bp.unit_tokens / bp.key_codes());
    let group_base = slice_base + token / bp.group_size * ((group_lines + 1) * width);
    let line_base = group_base + token % bp.group_size / codes * width;
    let param_base = group_base + group_lines * width;
    let mut lines = Array::<Vector<u32, N>>::new(unit_lines);
    let mut folded = Array::<f32>::new(rows);
    let mut offset = zeros(rows);
    for step in 0..comptime!(bp.head_dim.keys / bp.vector / bp.lanes) {
        let column = step * bp.lanes + lane;
        let params = keys[param_base + column];
        #[unroll]
        for i in 0..unit_lines {
            lines[i] = keys[line_base + i * width + column];
        }
        #[unroll]
        for k in 0..comptime!(bp.vector) {
            let param = params.extract(k);
            let scale = K::scale(param);
            let min = K::offset(param);
            #[unroll]
            for r in 0..rows {
                let q = query[r * comptime!(bp.head_dim.keys) + column * bp.vector + k];
                if comptime!(K::LINEAR) {
                    folded[r] = q * scale;
                    offset[r] += q * min;
                } else {
                    folded[r] = q;
                }
            }
            #[unroll]
            for i in 0..unit_lines {
                let word = lines[i].extract(k);
                #[unroll]
                for j in 0..codes {
                    let element = element::<K>(word, j, scale, min, bp.key_bits);
                    #[unroll]
                    for r in 0..rows {
                        scores[r * unit_tokens + i * codes + j] += folded[r] * element;
                    }
                }
            }
        }
    }
    #[unroll]
    for r in 0..rows {
        #[unroll]
        for t in 0..unit_tokens {
            scores[r * unit_tokens + t] += offset[r];
        }
    }
}

/// Code number `index` of a word as sums over codes take it: as a number where scale and offset are taken out of
/// them, else restored.
#[cube]
pub(super) fn element<F: PackedInKernels>(
    word: u32,
    index: usize,
    scale: f32,
    offset: f32,
    #[comptime] n_bits: u32,
) -> f32 {
    let code = code_at(word, index, n_bits);
    if comptime!(F::LINEAR) { f32::cast_from(code) } else { F::restore(code, scale, offset) }
}

/// As [`score_packed`], for keys in float. Here `token` is counted from the first sink, and the run
/// ends before `end`.
#[cube]
fn score_float<R: Float, N: Size>(
    floats: &[Vector<R, N>],
    slice_base: usize,
    token: usize,
    end: usize,
    lane: usize,
    query: &Shared<[f32]>,
    scores: &mut Array<f32>,
    side: &SideArgs,
    #[comptime] bp: DecodeBlueprint,
) {
    let rows = comptime!(bp.rows);
    let unit_tokens = comptime!(bp.unit_tokens);
    let mut bases = Array::<usize>::new(unit_tokens);
    #[unroll]
    for t in 0..unit_tokens {
        // Tokens past the end are read as the last one; the caller masks their scores.
        let mut at = token + t;
        if at >= end {
            at = end - 1;
        }
        bases[t] = (slice_base + float_element(at, side)) / comptime!(bp.vector);
    }
    for step in 0..comptime!(bp.head_dim.keys / bp.vector / bp.lanes) {
        let column = step * bp.lanes + lane;
        #[unroll]
        for t in 0..unit_tokens {
            let key = floats[bases[t] + column];
            #[unroll]
            for k in 0..comptime!(bp.vector) {
                let channel = f32::cast_from(key.extract(k));
                #[unroll]
                for r in 0..rows {
                    let q = query[r * comptime!(bp.head_dim.keys) + column * bp.vector + k];
                    scores[r * unit_tokens + t] += q * channel;
                }
            }
        }
    }
}
