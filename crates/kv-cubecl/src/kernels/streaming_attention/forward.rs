//! The forward pass with products blocked in registers.

use cubecl::prelude::*;

use super::kernel::{
    Block, Inputs, StreamArgs, quantized_end, score_of, sees, skip_hidden, visible,
};
use crate::kernels::{
    decode_attention::{DOWN, LOWEST},
    grid::cube_at,
    row_blocks::{
        RowBlocks, RowState, gather, maximum, new_rows, output as output_of, read_four, sum, weigh,
    },
};

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ForwardBlueprint {
    pub(super) blocks: RowBlocks,
    /// See [`Grid::flat`](crate::kernels::Grid::flat).
    pub(super) flat: bool,
    /// True if keys are quantized.
    pub(super) keys: bool,
    /// True if values are quantized.
    pub(super) values: bool,
    /// True if a sliding window may hide tokens.
    pub(super) window: bool,
    /// True if scores have a soft cap.
    pub(super) softcap: bool,
}

/// Consecutive tokens, at most a tile of them.
#[derive(CubeType)]
struct Tile {
    start: usize,
    /// One past the last.
    end: usize,
}

/// Products of the query rows with the unit's keys of `tile`, `[rows, unit_tokens]`.
#[cube]
fn products<Q: Float, N: Size>(
    inputs: &Inputs<Vector<Q, N>, Vector<f32, N>>,
    tile: &Tile,
    block: &Block,
    args: &StreamArgs,
    #[comptime] bp: ForwardBlueprint,
) -> Array<f32> {
    let rows = comptime!(bp.blocks.rows);
    let unit_tokens = comptime!(bp.blocks.unit_tokens);
    let width = comptime!(bp.blocks.head_dim.keys / 4);
    let key_base = block.head / args.n_rep * args.n;
    let token = tile.start + UNIT_POS as usize * unit_tokens;
    let mut scores = Array::<f32>::new(comptime!(bp.blocks.rows * bp.blocks.unit_tokens));
    #[unroll]
    for i in 0..comptime!(bp.blocks.rows * bp.blocks.unit_tokens) {
        scores[i] = f32::new(0.0);
    }
    if token < tile.end {
        let mut run = Array::<f32>::new(comptime!(4 * bp.blocks.unit_tokens));
        let mut run_hat = Array::<f32>::new(comptime!(4 * bp.blocks.unit_tokens));
        let mut queries = Array::<usize>::new(rows);
        let mut quantized_ends = Array::<usize>::new(rows);
        #[unroll]
        for r in 0..rows {
            // Rows past the last one repeat it, and are not written.
            let row = clamp_max(block.first_row + r, args.m - 1);
            queries[r] = (block.head * args.m + row) * width;
            quantized_ends[r] = quantized_end(row, &args.schedule.keys, args);
        }
        for column in 0..width {
            #[unroll]
            for t in 0..unit_tokens {
                let at = (key_base + clamp_max(token + t, tile.end - 1)) * width + column;
                read_four::<f32, N>(&inputs.key, at, &mut run, t);
                if comptime!(bp.keys) {
                    read_four::<f32, N>(&inputs.key_hat, at, &mut run_hat, t);
                }
            }
            #[unroll]
            for r in 0..rows {
                let q = inputs.query[queries[r] + column];
                #[unroll]
                for t in 0..unit_tokens {
                    let mut score = scores[r * unit_tokens + t];
                    #[unroll]
                    for k in 0..4usize {
                        let mut channel = run[t * 4 + k];
                        if comptime!(bp.keys) {
                            let hat = token + t < quantized_ends[r];
                            channel = select(hat, run_hat[t * 4 + k], channel);
                        }
                        score += f32::cast_from(q.extract(k)) * channel;
                    }
                    scores[r * unit_tokens + t] = score;
                }
            }
        }
    }
    scores
}

/// Scores of the unit's tokens of `tile`, `[rows, unit_tokens]`. Without `masked`, every row sees
/// all of them.
#[cube]
fn score<Q: Float, N: Size>(
    inputs: &Inputs<Vector<Q, N>, Vector<f32, N>>,
    tile: &Tile,
    block: &Block,
    args: &StreamArgs,
    #[comptime] masked: bool,
    #[comptime] bp: ForwardBlueprint,
) -> Array<f32> {
    let unit_tokens = comptime!(bp.blocks.unit_tokens);
    let token = tile.start + UNIT_POS as usize * unit_tokens;
    let mut scores = products::<Q, N>(inputs, tile, block, args, bp);
    #[unroll]
    for r in 0..comptime!(bp.blocks.rows) {
        let row = clamp_max(block.first_row + r, args.m - 1);
        let end = visible(row, args);
        #[unroll]
        for t in 0..unit_tokens {
            let mut score = score_of(scores[r * unit_tokens + t], args, bp.softcap);
            if comptime!(masked) {
                let seen = sees(row, token + t, end, args, bp.window);
                score = select(seen, score, f32::new(LOWEST));
            }
            scores[r * unit_tokens + t] = score;
        }
    }
    scores
}

/// Reads the unit's channels of four values, from the vector of channels `column` on, to `run` and
/// `run_hat` `[4, unit_channels]`. `rows` are the values' rows.
#[cube]
fn read_values<Q: Float, N: Size>(
    inputs: &Inputs<Vector<Q, N>, Vector<f32, N>>,
    rows: &Array<usize>,
    column: usize,
    run: &mut Array<f32>,
    run_hat: &mut Array<f32>,
    #[comptime] bp: ForwardBlueprint,
) {
    let fours = comptime!(bp.blocks.unit_channels / 4);
    #[unroll]
    for t in 0..4usize {
        let at = rows[t] * comptime!(bp.blocks.head_dim.values / 4) + column;
        #[unroll]
        for i in 0..fours {
            read_four::<f32, N>(&inputs.value, at + i, run, t * fours + i);
            if comptime!(bp.values) {
                read_four::<f32, N>(&inputs.value_hat, at + i, run_hat, t * fours + i);
            }
        }
    }
}

/// Adds to the unit's outputs the values of `tile` with the weights that [`weigh`] has left.
#[cube]
fn add_values<Q: Float, N: Size>(
    inputs: &Inputs<Vector<Q, N>, Vector<f32, N>>,
    tile: &Tile,
    block: &Block,
    state: &mut RowState<N>,
    args: &StreamArgs,
    #[comptime] masked: bool,
    #[comptime] bp: ForwardBlueprint,
) {
    let rows = comptime!(bp.blocks.rows);
    let unit_channels = comptime!(bp.blocks.unit_channels);
    let tile_fours = comptime!(bp.blocks.tile() / 4);
    let strides = comptime!(bp.blocks.strides());
    let (first_row, first_value) = (block.first_row, block.head / args.n_rep * args.n);
    if state.stride < strides {
        let mut quantized_ends = Array::<usize>::new(rows);
        let mut ends = Array::<usize>::new(rows);
        #[unroll]
        for r in 0..rows {
            quantized_ends[r] = quantized_end(first_row + r, &args.schedule.values, args);
            ends[r] = visible(first_row + r, args);
        }
        let mut run = Array::<f32>::new(comptime!(4 * bp.blocks.unit_channels));
        let mut run_hat = Array::<f32>::new(comptime!(4 * bp.blocks.unit_channels));
        let mut values = Array::<usize>::new(4usize);
        let n_fours = (tile.end - tile.start).div_ceil(4);
        let mut four = state.stride;
        while four < n_fours {
            let token = tile.start + four * 4;
            #[unroll]
            for t in 0..4usize {
                values[t] = first_value + clamp_max(token + t, tile.end - 1);
            }
            let column = state.block * comptime!(bp.blocks.unit_channels / 4);
            read_values::<Q, N>(inputs, &values, column, &mut run, &mut run_hat, bp);
            #[unroll]
            for r in 0..rows {
                let weights = state.weights[r * tile_fours + four];
                #[unroll]
                for c in 0..unit_channels {
                    let mut sum = state.outputs[r * unit_channels + c];
                    #[unroll]
                    for t in 0..4usize {
                        let mut channel = run[t * unit_channels + c];
                        if comptime!(bp.values) {
                            let hat = token + t < quantized_ends[r];
                            channel = select(hat, run_hat[t * unit_channels + c], channel);
                        }
                        if comptime!(masked) {
                            // A hidden token has weight 0, but 0 times infinity is not 0.
                            let (row, at) = (first_row + r, token + t);
                            let seen = sees(row, at, ends[r], args, bp.window);
                            channel = select(seen, channel, f32::new(0.0));
                        }
                        sum += weights.extract(t) * channel;
                    }
                    state.outputs[r * unit_channels + c] = sum;
                }
            }
            four += strides;
        }
    }
}

/// Attends to a tile; see [`score`].
#[cube]
fn attend_tile<Q: Float, N: Size>(
    inputs: &Inputs<Vector<Q, N>, Vector<f32, N>>,
    tile: &Tile,
    block: &Block,
    state: &mut RowState<N>,
    args: &StreamArgs,
    #[comptime] masked: bool,
    #[comptime] bp: ForwardBlueprint,
) {
    let scores = score::<Q, N>(inputs, tile, block, args, masked, bp);
    weigh::<N>(&scores, state, comptime!(bp.blocks));
    add_values::<Q, N>(inputs, tile, block, state, args, masked, bp);
}

/// One cube per (block of rows, query head).
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
pub(super) fn forward_blocked<Q: Float, N: Size>(
    inputs: Inputs<Vector<Q, N>, Vector<f32, N>>,
    output: &mut [Vector<Q, N>],
    lse: &mut [f32],
    args: StreamArgs,
    #[comptime] bp: ForwardBlueprint,
    #[define(Q)] _query_type: ElemType,
) {
    let rows = comptime!(bp.blocks.rows);
    let units = comptime!(bp.blocks.units);
    let tile = comptime!(bp.blocks.tile());
    let unit = UNIT_POS as usize;
    let place = cube_at(args.m.div_ceil(rows), args.heads, comptime!(bp.flat));
    let block = Block { head: place.y, first_row: place.x * rows };
    let (head, first_row) = (block.head, block.first_row);
    if comptime!(bp.flat) {
        if place.z > 0 {
            terminate!();
        }
    }
    let mut state = new_rows::<N>(comptime!(bp.blocks));

    let end = visible(clamp_max(first_row + rows, args.m) - 1, &args);
    let mut start = skip_hidden(0usize, first_row, &args, bp.window);
    if comptime!(!bp.window) {
        // The first row sees the fewest tokens: every row sees its whole tiles.
        let whole = visible(first_row, &args) / tile;
        for index in 0..whole {
            let tile = Tile { start: index * tile, end: index * tile + tile };
            attend_tile::<Q, N>(&inputs, &tile, &block, &mut state, &args, false, bp);
        }
        start = whole * tile;
    }
    while start < end {
        let part = Tile { start, end: clamp_max(start + tile, end) };
        attend_tile::<Q, N>(&inputs, &part, &block, &mut state, &args, true, bp);
        start = skip_hidden(start + tile, first_row, &args, bp.window);
    }

    gather::<N>(&mut state, comptime!(bp.blocks));
    let rows_left = clamp_max(args.m - first_row, rows);
    let first = head * args.m + first_row;
    let mut r = unit;
    while r < rows_left {
        lse[first + r] = maximum::<N>(&state, r) + sum::<N>(&state, r, comptime!(bp.blocks)).ln();
        r += units;
    }
    let width = comptime!(bp.blocks.head_dim.values / 4);
    let mut i = unit;
    while i < rows_left * width {
        let (r, column) = (i / width, i % width);
        let total = sum::<N>(&state, r, comptime!(bp.blocks)) * f32::new(DOWN);
        let total = Vector::<f32, N>::new(total);
        let row = output_of::<N>(&state, r, column, comptime!(bp.blocks)) / total;
        output[first * width + i] = Vector::cast_from(row);
        i += units;
    }
}
