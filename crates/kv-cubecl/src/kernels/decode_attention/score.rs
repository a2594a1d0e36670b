//! Scores of the run of consecutive tokens that a unit works on.

use cubecl::prelude::*;

use super::base::DecodeBlueprint;
use crate::kernels::{
    codec::{code_at, min_of, scale_of},
    layout::{SideArgs, float_element},
};

/// Adds to `scores` `[rows, unit_tokens]` the products of the query with the packed keys of a
/// unit's run of tokens, over the unit's share of the channels. The run starts at `token`, counted
/// after the sinks.
///
/// Scale and minimum are folded into the query once per channel, not once per code.
#[cube]
pub(super) fn score_packed<N: Size>(
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
    let mut offset = Array::<f32>::new(rows);
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
            let scale = scale_of(param);
            let min = min_of(param);
            #[unroll]
            for r in 0..rows {
                let q = query[r * comptime!(bp.head_dim.keys) + column * bp.vector + k];
                folded[r] = q * scale;
                offset[r] += q * min;
            }
            #[unroll]
            for i in 0..unit_lines {
                let word = lines[i].extract(k);
                #[unroll]
                for j in 0..codes {
                    let code = code_at(word, j, bp.key_bits);
                    #[unroll]
                    for r in 0..rows {
                        scores[r * unit_tokens + i * codes + j] += folded[r] * code;
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

/// As [`score_packed`], for keys in float. Here `token` is counted from the first sink, and the run
/// ends before `end`.
#[cube]
pub(super) fn score_float<R: Float, N: Size>(
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
