use cubecl::prelude::*;

use super::{
    args::{CacheBuffers, DecodeArgs},
    base::DecodeBlueprint,
    rows::{load_query, log_sum_exp, new_rows, normalized, weigh, write_rows},
    score::score,
    tiles::{LOWEST, extent_of, tile_at},
    values::add_values,
};
use crate::kernels::{
    grid::cube_at,
    hadamard::{hadamard_rows, hadamard_scale},
};

/// One cube per (slice, split, chunk of query rows); writes `(o, m, l)` of each row to `results`
/// `[slices, rows, n_splits, head_dim + 2]`, with the head_dim of values. A split that is the whole
/// writes the output to `results` `[slices, rows, head_dim]`, and to `lse` `[slices, rows]`.
///
/// Keys: a unit takes `unit_tokens` consecutive tokens and every `lanes`-th vector of their
/// channels. Values: a unit takes `unit_channels` consecutive channels and every `strides`-th
/// token.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
pub(super) fn partial_attention<R: Float, Q: Float, N: Size>(
    query: &[Q],
    buffers: CacheBuffers<R, N>,
    results: &mut [f32],
    lse: &mut [f32],
    args: DecodeArgs,
    #[comptime] bp: DecodeBlueprint,
    #[define(R)] _dtype: ElemType,
    #[define(Q)] _query_type: ElemType,
) {
    let place = cube_at(args.slices, args.n_splits, comptime!(bp.flat));
    let (slice, split) = (place.x, place.y);
    let first_row = place.z * comptime!(bp.rows);
    if comptime!(bp.flat) {
        if first_row >= args.rows {
            terminate!();
        }
    }
    let mut rows = new_rows(bp);
    let extent = extent_of(slice, split, &args, bp);
    load_query::<Q>(query, &mut rows, slice, first_row, extent.tokens, &args, bp);
    for index in extent.first_tile..extent.last_tile {
        let tile = tile_at(index, &extent, &args, bp);
        let scores = score::<R, N>(&buffers, slice, &tile, &rows, &args, bp);
        weigh(&scores, &tile, &mut rows, bp);
        add_values::<R, N>(&buffers, slice, &tile, &extent, &mut rows, &args, bp);
        sync_cube();
    }
    if extent.tokens == 0 && rows.unit == 0 {
        // Tells that the sequence takes no part: sums of weights are never below 0.
        #[unroll]
        for r in 0..comptime!(bp.rows) {
            rows.sums[r] = f32::new(-1.0);
        }
    }
    write_rows(results, lse, &mut rows, slice, split, first_row, &args, bp);
}

/// Merges the partial softmaxes of the splits of each row; one unit per (row, channel). If
/// `hadamard` is the number of channels, a cube has one row and undoes its Hadamard transform.
#[cube(launch, address_type = "dynamic")]
pub(super) fn merge_partials<Q: Float>(
    partials: &[f32],
    output: &mut [Q],
    lse: &mut [f32],
    n: usize,
    n_splits: usize,
    head_dim: usize,
    #[comptime] hadamard: Option<usize>,
    #[define(Q)] _query_type: ElemType,
) {
    let mut merged = f32::new(0.0);
    if ABSOLUTE_POS < n {
        let row = ABSOLUTE_POS / head_dim;
        let channel = ABSOLUTE_POS % head_dim;
        let stride = head_dim + 2;
        let base = row * n_splits * stride;
        let mut maximum = f32::new(LOWEST);
        for split in 0..n_splits {
            maximum = clamp_min(maximum, partials[base + split * stride + head_dim]);
        }
        let mut sum = f32::new(0.0);
        let mut out = f32::new(0.0);
        for split in 0..n_splits {
            let at = base + split * stride;
            let weight = (partials[at + head_dim] - maximum).exp();
            sum += weight * partials[at + head_dim + 1];
            out += weight * partials[at + channel];
        }
        merged = normalized(out, sum);
        if channel == 0 {
            lse[row] = log_sum_exp(maximum, sum);
        }
    }
    #[comptime]
    match hadamard {
        Some(channels) => {
            let unit = UNIT_POS as usize;
            let mut row = Shared::<[f32]>::new_slice(channels);
            row[unit] = merged;
            hadamard_rows(&mut row, unit, channels, channels, channels);
            merged = row[unit] * comptime!(hadamard_scale(channels));
        }
        None => {}
    }
    if ABSOLUTE_POS < n {
        output[ABSOLUTE_POS] = Q::cast_from(merged);
    }
}
