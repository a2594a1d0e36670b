use cubecl::prelude::*;

use super::{
    args::{CacheBuffers, DecodeArgs},
    base::DecodeBlueprint,
    rows::{load_query, log_sum_exp, new_rows, normalized, weigh, write_rows},
    score::score,
    values::add_values,
};
use crate::kernels::{
    grid::cube_at,
    layout::{begin, quantized},
};

/// The score of a masked token, below every other except -inf; WGSL has no literal for infinity.
pub(crate) const LOWEST: f32 = f32::MIN;

/// The weight of a score: 0 if it is masked, NaN if it is NaN.
#[cube]
pub(crate) fn weight_of(score: f32, largest: f32) -> f32 {
    // A NaN score must get weight NaN, so the test is not `score > LOWEST`.
    select(score == f32::new(LOWEST), f32::new(0.0), (score - largest).exp())
}

/// The tokens that a split attends to, and how they are stored.
#[derive(CubeType)]
pub(super) struct Extent {
    tokens: usize,
    /// The first token past the sinks that is seen.
    begin: usize,
    /// The first packed key that is read, from which on groups are whole.
    first_packed: usize,
    /// One past the last packed key, and the first key past the sinks that is seen in float.
    end_packed: usize,
    first_float: usize,
    /// Tokens after the sinks whose values are packed.
    pub(super) packed_values: usize,
    /// First tile of the split, and one past its last.
    first_tile: usize,
    last_tile: usize,
}

/// The share of `split`: a run of tiles; the last splits may get none.
#[cube]
fn extent_of(
    slice: usize,
    split: usize,
    args: &DecodeArgs,
    #[comptime] bp: DecodeBlueprint,
) -> Extent {
    let tile = comptime!(bp.tile());
    let mut len = args.len;
    let mut tokens = args.tokens;
    #[comptime]
    match &args.positions.newest {
        ComptimeOption::Some(position) => {
            let position = position[slice / args.positions.slices];
            len = 0;
            // A full cache stays as it is; a sequence that takes no part has no tokens.
            if position >= 0 {
                len = clamp_max(position as usize, args.cache.capacity - 1) + 1;
            }
            tokens = len;
        }
        ComptimeOption::None => {}
    }
    let schedule = &args.cache.schedule;
    let sinks = clamp_max(schedule.sinks, tokens);
    let packed_values = quantized(len, &schedule.values, schedule);
    let packed_keys = clamp_max(quantized(len, &schedule.keys, schedule), tokens - sinks);
    let end_packed = sinks + packed_keys;
    let mut seen = sinks;
    let mut first_packed = sinks;
    let mut first_float = end_packed;
    if comptime!(bp.window) {
        seen = clamp_max(begin(tokens, schedule), tokens);
        if seen > end_packed {
            first_packed = end_packed;
            first_float = seen;
        } else if seen > sinks {
            let block_tokens = comptime!(bp.key_block_tokens());
            first_packed = sinks + (seen - sinks) / block_tokens * block_tokens;
        }
    }
    let n_tiles = sinks.div_ceil(tile)
        + (end_packed - first_packed).div_ceil(tile)
        + (tokens - first_float).div_ceil(tile);
    let share = n_tiles.div_ceil(args.n_splits);
    let first_tile = split * share;
    let last_tile = clamp_max(first_tile + share, n_tiles);
    Extent {
        tokens,
        begin: seen,
        first_packed,
        end_packed,
        first_float,
        packed_values,
        first_tile,
        last_tile,
    }
}

/// Consecutive tokens that are handled together, their keys all in one form.
#[derive(CubeType)]
pub(super) struct Tile {
    /// First token.
    pub(super) start: usize,
    /// One past the last.
    pub(super) end: usize,
    /// The first that is seen.
    pub(super) begin: usize,
    /// True if the tokens come after the sinks.
    pub(super) windowed: bool,
    /// True if their keys are packed.
    pub(super) packed: bool,
}

/// Tile `index`: those of sinks come first, then those of packed keys, then the keys in float.
#[cube]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
fn tile_at(
    index: usize,
    extent: &Extent,
    args: &DecodeArgs,
    #[comptime] bp: DecodeBlueprint,
) -> Tile {
    let tile = comptime!(bp.tile());
    let sinks = clamp_max(args.cache.schedule.sinks, extent.tokens);
    let sink_tiles = sinks.div_ceil(tile);
    let packed_tiles = (extent.end_packed - extent.first_packed).div_ceil(tile);
    let windowed = index >= sink_tiles;
    let packed = windowed && index < sink_tiles + packed_tiles;
    let mut start = index * tile;
    let mut limit = sinks;
    if packed {
        start = extent.first_packed + (index - sink_tiles) * tile;
        limit = extent.end_packed;
    } else if windowed {
        start = extent.first_float + (index - sink_tiles - packed_tiles) * tile;
        limit = extent.tokens;
    }
    let end = clamp_max(start + tile, limit);
    let mut begin = start;
    if comptime!(bp.window) {
        if windowed {
            begin = clamp_min(start, extent.begin);
        }
    }
    Tile { start, end, begin, windowed, packed }
}

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
    sync_cube();
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

/// Merges the partial softmaxes of the splits of each row; one unit per (row, channel).
#[cube(launch, address_type = "dynamic")]
pub(super) fn merge_partials<Q: Float>(
    partials: &[f32],
    output: &mut [Q],
    lse: &mut [f32],
    n: usize,
    n_splits: usize,
    head_dim: usize,
    #[define(Q)] _query_type: ElemType,
) {
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
        output[ABSOLUTE_POS] = Q::cast_from(normalized(out, sum));
        if channel == 0 {
            lse[row] = log_sum_exp(maximum, sum);
        }
    }
}
