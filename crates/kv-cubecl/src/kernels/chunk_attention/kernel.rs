use cubecl::prelude::*;

use super::{
    base::ChunkBlueprint,
    restore::{restore_keys, restore_value},
};
use crate::kernels::{
    decode_attention::{CacheBuffers, DecodeArgs, LOWEST},
    grid::cube_at,
    layout::{SideArgs, float_element, quantized},
    row_blocks::{RowState, gather, maximum, new_rows, output, read_four, sum, weigh},
    scores::softcap,
};

/// Division of the tokens into tiles and splits, at run time.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Tiles {
    /// Number of oldest tokens after the sinks that are packed on each quantized side; all tokens
    /// if no side is quantized.
    main: usize,
    main_tiles: usize,
    sink_tiles: usize,
    n_tiles: usize,
    tiles_per_split: usize,
}

/// Consecutive tokens, at most a tile of them.
#[derive(CubeType)]
struct Run {
    start: usize,
    /// One past the last.
    end: usize,
}

/// The query rows of a cube.
#[derive(CubeType)]
struct Block {
    slice: usize,
    first_row: usize,
}

/// The run of tokens whose keys a unit reads.
#[derive(CubeType)]
struct KeyRun {
    /// First token, and one past the last, counted after the sinks.
    token: usize,
    end: usize,
    /// True if the keys are packed.
    packed: bool,
    /// First vector of the packed keys of the slice.
    packed_base: usize,
    /// First vector of each key in float, `[unit_tokens]`.
    float_bases: Array<usize>,
}

/// Returns the run of tokens from `token` on.
#[cube]
fn key_run(
    token: usize,
    tile: &Run,
    slice: usize,
    args: &DecodeArgs,
    #[comptime] uniform: bool,
    #[comptime] bp: ChunkBlueprint,
) -> KeyRun {
    let unit_tokens = comptime!(bp.blocks.unit_tokens);
    let (cache, schedule) = (&args.cache, &args.cache.schedule);
    let sinks = schedule.sinks;
    let mut float_bases = Array::<usize>::new(unit_tokens);
    let mut packed = comptime!(bp.specs.keys.is_some() && uniform).runtime();
    if comptime!(bp.specs.keys.is_none() || !uniform) {
        packed = token >= sinks && token - sinks < quantized(args.len, &schedule.keys, schedule);
        #[unroll]
        for t in 0..unit_tokens {
            // Tokens past the end are read as the last one, and masked by the caller.
            let at = clamp_max(token + t, tile.end - 1);
            float_bases[t] = (slice * cache.float_elements + float_element(at, &cache.keys)) / 4;
        }
    }
    let packed_base = slice * cache.keys.slice_words / 4;
    KeyRun { token: token - sinks, end: tile.end - sinks, packed, packed_base, float_bases }
}

/// Reads four channels of the keys of a run to `run` `[unit_tokens, 4]`.
#[cube]
#[allow(clippy::if_same_then_else, clippy::collapsible_if, reason = "decided when compiled")]
fn read_keys<R: Float, N: Size>(
    buffers: &CacheBuffers<R, N>,
    keys: &KeyRun,
    column: usize,
    run: &mut Array<f32>,
    side: &SideArgs,
    #[comptime] uniform: bool,
    #[comptime] bp: ChunkBlueprint,
) {
    let (base, token, end) = (keys.packed_base, keys.token, keys.end);
    let mut float = true;
    let spec = comptime!(bp.specs.keys);
    #[comptime]
    match spec {
        Some(spec) => {
            if comptime!(uniform) {
                restore_keys::<N>(&buffers.keys, base, token, end, column, run, side, spec, bp);
            } else if keys.packed {
                restore_keys::<N>(&buffers.keys, base, token, end, column, run, side, spec, bp);
                float = false;
            }
        }
        None => {}
    }
    if comptime!(bp.specs.keys.is_none() || !uniform) {
        if float {
            #[unroll]
            for t in 0..comptime!(bp.blocks.unit_tokens) {
                read_four::<R, N>(&buffers.floats, keys.float_bases[t] + column, run, t);
            }
        }
    }
}

/// Scores of the unit's tokens of `tile`, `[rows, unit_tokens]`; those past its end are masked.
/// With `uniform`, each side that is quantized is packed for all of them; otherwise the form of
/// each token is looked up.
#[cube]
fn score<R: Float, N: Size>(
    query: &[Vector<f32, N>],
    buffers: &CacheBuffers<R, N>,
    tile: &Run,
    block: &Block,
    args: &DecodeArgs,
    #[comptime] uniform: bool,
    #[comptime] bp: ChunkBlueprint,
) -> Array<f32> {
    let rows = comptime!(bp.blocks.rows);
    let unit_tokens = comptime!(bp.blocks.unit_tokens);
    let width = comptime!(bp.blocks.head_dim.keys / 4);
    let token = tile.start + UNIT_POS as usize * unit_tokens;
    let mut scores = Array::<f32>::new(comptime!(bp.blocks.rows * bp.blocks.unit_tokens));
    #[unroll]
    for i in 0..comptime!(bp.blocks.rows * bp.blocks.unit_tokens) {
        scores[i] = f32::new(0.0);
    }
    if token < tile.end {
        let mut run = Array::<f32>::new(comptime!(4 * bp.blocks.unit_tokens));
        let keys = key_run(token, tile, block.slice, args, uniform, bp);
        let mut queries = Array::<usize>::new(rows);
        #[unroll]
        for r in 0..rows {
            // Rows past the last one repeat it, and are not written.
            let row = clamp_max(block.first_row + r, args.rows - 1);
            queries[r] = (block.slice * args.rows + row) * width;
        }
        for column in 0..width {
            read_keys::<R, N>(buffers, &keys, column, &mut run, &args.cache.keys, uniform, bp);
            #[unroll]
            for r in 0..rows {
                let q = query[queries[r] + column];
                #[unroll]
                for t in 0..unit_tokens {
                    let mut score = scores[r * unit_tokens + t];
                    #[unroll]
                    for k in 0..4usize {
                        score += q.extract(k) * run[t * 4 + k];
                    }
                    scores[r * unit_tokens + t] = score;
                }
            }
        }
    }
    #[unroll]
    for i in 0..comptime!(bp.blocks.rows * bp.blocks.unit_tokens) {
        let past = token + i % unit_tokens >= tile.end;
        let mut score = scores[i] * args.scale;
        if comptime!(bp.softcap) {
            score = softcap(score, args.softcap);
        }
        scores[i] = select(past, f32::new(LOWEST), score);
    }
    scores
}

/// Reads a unit's block of channels of the value of a token to row `at` of `run`.
#[cube]
#[allow(clippy::if_same_then_else, clippy::collapsible_if, reason = "decided when compiled")]
fn read_value<R: Float, N: Size>(
    buffers: &CacheBuffers<R, N>,
    token: usize,
    slice: usize,
    block: usize,
    run: &mut Array<f32>,
    args: &DecodeArgs,
    #[comptime] at: usize,
    #[comptime] uniform: bool,
    #[comptime] bp: ChunkBlueprint,
) {
    let (cache, side, schedule) = (&args.cache, &args.cache.values, &args.cache.schedule);
    let sinks = schedule.sinks;
    let mut float = true;
    let spec = comptime!(bp.specs.values);
    #[comptime]
    match spec {
        Some(spec) => {
            let (values, base) = (&buffers.values, slice * side.slice_words);
            let packed = quantized(args.len, &schedule.values, schedule);
            if comptime!(uniform) {
                restore_value(values, base, token - sinks, block, run, side, at, spec, bp);
            } else if token >= sinks && token - sinks < packed {
                restore_value(values, base, token - sinks, block, run, side, at, spec, bp);
                float = false;
            }
        }
        None => {}
    }
    if comptime!(bp.specs.values.is_none() || !uniform) {
        if float {
            let row = slice * cache.float_elements + float_element(token, side);
            let fours = comptime!(bp.blocks.unit_channels / 4);
            let first = row / 4 + block * fours;
            #[unroll]
            for i in 0..fours {
                read_four::<R, N>(&buffers.floats, first + i, run, at * fours + i);
            }
        }
    }
}

/// Adds to the unit's outputs the values of `tile` with the weights that [`weigh`] has left.
#[cube]
fn add_values<R: Float, N: Size>(
    buffers: &CacheBuffers<R, N>,
    tile: &Run,
    slice: usize,
    state: &mut RowState<N>,
    args: &DecodeArgs,
    #[comptime] uniform: bool,
    #[comptime] bp: ChunkBlueprint,
) {
    let unit_channels = comptime!(bp.blocks.unit_channels);
    let tile_fours = comptime!(bp.blocks.tile() / 4);
    let strides = comptime!(bp.blocks.strides());
    let n_fours = (tile.end - tile.start).div_ceil(4);
    let mut run = Array::<f32>::new(comptime!(4 * bp.blocks.unit_channels));
    let mut four = state.stride;
    // Units past the last stride have no block of channels.
    let limit = select(state.stride < strides, n_fours, 0usize);
    while four < limit {
        #[unroll]
        for t in 0..4usize {
            // Past the end the weight is zero.
            let token = clamp_max(tile.start + four * 4 + t, tile.end - 1);
            read_value::<R, N>(buffers, token, slice, state.block, &mut run, args, t, uniform, bp);
        }
        #[unroll]
        for r in 0..comptime!(bp.blocks.rows) {
            let weights = state.weights[r * tile_fours + four];
            #[unroll]
            for c in 0..unit_channels {
                let mut sum = state.outputs[r * unit_channels + c];
                #[unroll]
                for t in 0..4usize {
                    sum += weights.extract(t) * run[t * unit_channels + c];
                }
                state.outputs[r * unit_channels + c] = sum;
            }
        }
        four += strides;
    }
}

/// Attends to a tile; see [`score`].
#[cube]
fn attend_tile<R: Float, N: Size>(
    query: &[Vector<f32, N>],
    buffers: &CacheBuffers<R, N>,
    tile: &Run,
    block: &Block,
    state: &mut RowState<N>,
    args: &DecodeArgs,
    #[comptime] uniform: bool,
    #[comptime] bp: ChunkBlueprint,
) {
    let scores = score::<R, N>(query, buffers, tile, block, args, uniform, bp);
    weigh::<N>(&scores, state, comptime!(bp.blocks));
    add_values::<R, N>(buffers, tile, block.slice, state, args, uniform, bp);
}

/// One cube per (slice, split, chunk of query rows); writes `(o, m, l)` of each row to
/// `partials` `[slices, rows, n_splits, head_dim + 2]`, with the head_dim of values.
///
/// If something is packed, the tiles of the `main` tokens that follow the sinks come first, then
/// those of the sinks, then those of the rest; otherwise all tokens are `main`. Scores: a unit
/// takes `unit_tokens` consecutive tokens, all query rows and all channels. Outputs: a unit takes
/// `unit_channels` consecutive channels, all query rows and every `strides`-th four tokens.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
pub(super) fn partial_attention<R: Float, N: Size>(
    query: &[Vector<f32, N>],
    buffers: CacheBuffers<R, N>,
    partials: &mut [f32],
    args: DecodeArgs,
    tiles: Tiles,
    #[comptime] bp: ChunkBlueprint,
    #[define(R)] _dtype: ElemType,
) {
    let rows = comptime!(bp.blocks.rows);
    let tile = comptime!(bp.blocks.tile());
    let place = cube_at(args.slices, args.n_splits, comptime!(bp.flat));
    let block = Block { slice: place.x, first_row: place.z * rows };
    if comptime!(bp.flat) {
        if block.first_row >= args.rows {
            terminate!();
        }
    }
    let mut state = new_rows::<N>(comptime!(bp.blocks));

    // Two loops, because tiles of old tokens need no branches, and some drivers run both sides of
    // every branch.
    let first = place.y * tiles.tiles_per_split;
    let last = clamp_max(first + tiles.tiles_per_split, tiles.n_tiles);
    let mut main_start = 0usize;
    if comptime!(bp.packed()) {
        main_start = clamp_max(args.cache.schedule.sinks, args.tokens);
    }
    let main_end = main_start + tiles.main;
    for index in first..clamp_max(last, tiles.main_tiles) {
        let start = main_start + index * tile;
        let end = clamp_max(start + tile, main_end);
        let tile = Run { start, end };
        attend_tile::<R, N>(query, &buffers, &tile, &block, &mut state, &args, true, bp);
    }
    if comptime!(bp.packed()) {
        for index in clamp_min(first, tiles.main_tiles)..last {
            let other = index - tiles.main_tiles;
            let mut start = other * tile;
            let mut limit = main_start;
            if other >= tiles.sink_tiles {
                start = main_end + (other - tiles.sink_tiles) * tile;
                limit = args.tokens;
            }
            let end = clamp_max(start + tile, limit);
            let tile = Run { start, end };
            attend_tile::<R, N>(query, &buffers, &tile, &block, &mut state, &args, false, bp);
        }
    }

    gather::<N>(&mut state, comptime!(bp.blocks));
    write_partials::<N>(partials, &state, &block, place.y, &args, bp);
}

/// Writes the sums of a split, after they were gathered.
#[cube]
fn write_partials<N: Size>(
    partials: &mut [f32],
    state: &RowState<N>,
    block: &Block,
    split: usize,
    args: &DecodeArgs,
    #[comptime] bp: ChunkBlueprint,
) {
    let head_dim = comptime!(bp.blocks.head_dim.values);
    let units = comptime!(bp.blocks.units);
    let unit = UNIT_POS as usize;
    let rows_left = clamp_max(args.rows - block.first_row, comptime!(bp.blocks.rows));
    let first_partial = block.slice * args.rows + block.first_row;
    let mut r = unit;
    while r < rows_left {
        let base = ((first_partial + r) * args.n_splits + split) * (head_dim + 2);
        partials[base + head_dim] = maximum::<N>(state, r);
        partials[base + head_dim + 1] = sum::<N>(state, r, comptime!(bp.blocks));
        r += units;
    }
    let width = comptime!(bp.blocks.head_dim.values / 4);
    let mut i = unit;
    while i < rows_left * width {
        let (r, column) = (i / width, i % width);
        let total = output::<N>(state, r, column, comptime!(bp.blocks));
        let base = ((first_partial + r) * args.n_splits + split) * (head_dim + 2) + column * 4;
        #[unroll]
        for k in 0..4usize {
            partials[base + k] = total.extract(k);
        }
        i += units;
    }
}
