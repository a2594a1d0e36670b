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

/// Parts of an output row that are read before the first of them is added.
const PARTS_AT_ONCE: usize = 4;

/// Merges the partial softmaxes of the splits of each row, and undoes the Hadamard transform if
/// values have one. A cube has `units` channels of one row, and a unit one of them. The units read
/// `m` and `l` of `units` splits at a time, one each, and share the weights of these splits.
#[cube(launch, address_type = "dynamic")]
pub(super) fn merge_partials<Q: Float>(
    partials: &[f32],
    output: &mut [Q],
    lse: &mut [f32],
    rows: usize,
    n_splits: usize,
    #[comptime] head_dim: usize,
    #[comptime] units: usize,
    #[comptime] hadamard: bool,
    #[define(Q)] _query_type: ElemType,
) {
    let unit = UNIT_POS as usize;
    let blocks = comptime!(head_dim.div_ceil(units));
    let (nth, block) = (CUBE_POS / blocks, CUBE_POS % blocks);
    // Cubes past the last row repeat it and write nothing.
    let row = clamp_max(nth, rows - 1);
    let stride = comptime!(head_dim + 2);
    let base = row * n_splits * stride;
    let own = block * units + unit;
    let channel = clamp_max(own, comptime!(head_dim - 1));
    let mut shared = Shared::<[f32]>::new_slice(comptime!(2 * units));
    let mut maximum = f32::new(LOWEST);
    let mut sum = f32::new(0.0);
    let mut out = f32::new(0.0);
    let mut first = 0usize;
    while first < n_splits {
        let count = clamp_max(n_splits - first, units);
        // Splits past the last are read as it, and left out.
        let mine = base + clamp_max(first + unit, n_splits - 1) * stride;
        let (largest, weights) = (partials[mine + head_dim], partials[mine + head_dim + 1]);
        shared[unit] = largest;
        sync_cube();
        let before = maximum;
        for i in 0..count {
            maximum = clamp_min(maximum, shared[i]);
        }
        sync_cube();
        let weight = (largest - maximum).exp();
        shared[unit] = weight;
        shared[units + unit] = weight * weights;
        sync_cube();
        let factor = (before - maximum).exp();
        sum *= factor;
        out *= factor;
        for i in 0..count {
            sum += shared[units + i];
        }
        let from = base + first * stride + channel;
        let mut split = 0usize;
        while split + PARTS_AT_ONCE <= count {
            let mut parts = Array::<f32>::new(PARTS_AT_ONCE);
            #[unroll]
            for i in 0..PARTS_AT_ONCE {
                parts[i] = partials[from + (split + i) * stride];
            }
            #[unroll]
            for i in 0..PARTS_AT_ONCE {
                out += shared[split + i] * parts[i];
            }
            split += PARTS_AT_ONCE;
        }
        while split < count {
            out += shared[split] * partials[from + split * stride];
            split += 1;
        }
        sync_cube();
        first += units;
    }
    let mut merged = normalized(out, sum);
    if comptime!(hadamard) {
        shared[unit] = merged;
        hadamard_rows(&mut shared, unit, units, head_dim, head_dim);
        merged = shared[unit] * comptime!(hadamard_scale(head_dim));
    }
    if nth < rows {
        if own < head_dim {
            output[row * head_dim + own] = Q::cast_from(merged);
        }
        if own == 0 {
            lse[row] = log_sum_exp(maximum, sum);
        }
    }
}
