use cubecl::prelude::*;

use super::base::ChunkBlueprint;
use crate::{
    formats::{
        Granularity, QuantSpec,
        cube::{code_in, high_bits, high_shift, high_word, low_word, offset, restore, scale},
    },
    kernels::{
        decode_attention::{DecodeArgs, LOWEST, value_place, word_at},
        grid::cube_at,
        layout::{SideArgs, float_element, parameter_in, parameter_place, quantized},
        row_blocks::{RowState, gather, maximum, new_rows, output, read_four, sum, weigh},
        scores::softcap,
    },
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

/// Restores four channels of the packed keys of a unit's run of tokens to `run` `[unit_tokens, 4]`.
/// The run starts at `token`, counted after the sinks. Keys are packed in groups of tokens.
#[cube]
fn restore_groups<N: Size>(
    keys: &[Vector<u32, N>],
    slice_base: usize,
    token: usize,
    column: usize,
    run: &mut Array<f32>,
    #[comptime] spec: QuantSpec,
    #[comptime] bp: ChunkBlueprint,
) {
    let codes = comptime!(spec.codes_per_word());
    let width = comptime!(bp.blocks.head_dim.keys / 4);
    let group_lines = comptime!(spec.code_words());
    // A run consists of whole words, or is a part of one.
    let unit_lines = comptime!(bp.blocks.unit_tokens.div_ceil(spec.codes_per_word()));
    let line_codes = comptime!(bp.blocks.unit_tokens.min(spec.codes_per_word()));
    let group_base = slice_base + token / spec.group_size * ((group_lines + 1) * width);
    let first_run = token % spec.group_size / codes;
    let first_code = token % codes;
    let params = keys[group_base + group_lines * width + column];
    let mut scales = Array::<f32>::new(4usize);
    let mut offsets = Array::<f32>::new(4usize);
    #[unroll]
    for k in 0..4usize {
        scales[k] = scale(params.extract(k), spec);
        offsets[k] = offset(params.extract(k), spec);
    }
    #[unroll]
    for i in 0..unit_lines {
        let line = keys[group_base + low_word(first_run + i, spec) * width + column];
        let mut high_line = line;
        if comptime!(spec.splits_codes()) {
            high_line = keys[group_base + high_word(first_run + i) * width + column];
        }
        #[unroll]
        for k in 0..4usize {
            let low = line.extract(k);
            let high = high_line.extract(k) >> high_shift(first_run + i);
            #[unroll]
            for j in 0..line_codes {
                let code = if comptime!(bp.blocks.unit_tokens < spec.codes_per_word()) {
                    code_in(low, high, first_code + j, spec)
                } else {
                    code_in(low, high, j, spec)
                };
                run[(i * line_codes + j) * 4 + k] = restore(code, scales[k], offsets[k], spec);
            }
        }
    }
}

/// As [`restore_groups`], for keys that are each packed by itself, with parameters that share
/// words. The run ends before `end`.
#[cube]
fn restore_tokens<N: Size>(
    keys: &[Vector<u32, N>],
    slice_base: usize,
    token: usize,
    end: usize,
    column: usize,
    run: &mut Array<f32>,
    side: &SideArgs,
    #[comptime] spec: QuantSpec,
    #[comptime] bp: ChunkBlueprint,
) {
    let key_dim = comptime!(bp.blocks.head_dim.keys);
    let codes = comptime!(spec.codes_per_word());
    let group = column * 4 / spec.group_size;
    #[unroll]
    for t in 0..comptime!(bp.blocks.unit_tokens) {
        // Tokens past the end are read as the last one, and masked by the caller.
        let slot = clamp_max(token + t, end - 1);
        let place = parameter_place(slot, group, side.packed_tokens, key_dim, spec);
        let param = word_at::<N>(keys, slice_base, place.word, 4usize);
        let scale = scale(parameter_in(param, place.shift, spec), spec);
        let at = slot * comptime!(bp.blocks.head_dim.keys / spec.codes_per_word());
        let word = word_at::<N>(keys, slice_base, at + column * 4 / codes, 4usize);
        #[unroll]
        for k in 0..4usize {
            let code = code_in(word, 0u32, column * 4 % codes + k, spec);
            run[t * 4 + k] = restore(code, scale, f32::new(0.0), spec);
        }
    }
}

/// Restores four channels of the packed keys of a unit's run of tokens, `token..end`.
#[cube]
fn restore_keys<N: Size>(
    keys: &[Vector<u32, N>],
    slice_base: usize,
    token: usize,
    end: usize,
    column: usize,
    run: &mut Array<f32>,
    side: &SideArgs,
    #[comptime] spec: QuantSpec,
    #[comptime] bp: ChunkBlueprint,
) {
    if comptime!(spec.granularity == Granularity::PerToken) {
        restore_tokens::<N>(keys, slice_base, token, end, column, run, side, spec, bp);
    } else {
        restore_groups::<N>(keys, slice_base, token, column, run, spec, bp);
    }
}

/// Restores a unit's channels of the value of a packed token to row `at` of `run`; `token` is
/// counted after the sinks.
#[cube]
fn restore_value(
    values: &[u32],
    slice_base: usize,
    token: usize,
    block: usize,
    run: &mut Array<f32>,
    side: &SideArgs,
    #[comptime] at: usize,
    #[comptime] spec: QuantSpec,
    #[comptime] bp: ChunkBlueprint,
) {
    let codes = comptime!(spec.codes_per_word());
    let channels = comptime!(bp.blocks.unit_channels);
    let group = block * channels / spec.group_size;
    let head_dim = comptime!(bp.blocks.head_dim.values);
    let place = value_place(values, slice_base, token, group, side, head_dim, spec);
    let codes_of_group = place.line + group * comptime!(spec.code_words());
    let first_run = block * channels % spec.group_size / codes;
    let scale = scale(place.parameter, spec);
    let offset = offset(place.parameter, spec);
    let word_codes = comptime!(bp.blocks.unit_channels.min(spec.codes_per_word()));
    #[unroll]
    for i in 0..comptime!(bp.blocks.unit_channels.div_ceil(spec.codes_per_word())) {
        let low = values[codes_of_group + low_word(first_run + i, spec)];
        let high = high_bits(values, codes_of_group, 1usize, first_run + i, spec);
        #[unroll]
        for j in 0..word_codes {
            let code = if comptime!(bp.blocks.unit_channels < spec.codes_per_word()) {
                code_in(low, high, block * channels % codes + j, spec)
            } else {
                code_in(low, high, j, spec)
            };
            run[at * channels + i * word_codes + j] = restore(code, scale, offset, spec);
        }
    }
}

/// Consecutive tokens, at most a tile of them.
#[derive(CubeType)]
struct Run {
    start: usize,
    /// One past the last.
    end: usize,
}

/// Scores of the unit's tokens of `tile`, `[rows, unit_tokens]`; those past its end are masked.
/// With `uniform`, each side that is quantized is packed for all of them; otherwise the form of
/// each token is looked up.
#[cube]
#[allow(clippy::if_same_then_else, clippy::collapsible_if, reason = "decided when compiled")]
fn score<R: Float, N: Size>(
    query: &[Vector<f32, N>],
    keys: &[Vector<u32, N>],
    floats: &[Vector<R, N>],
    tile: &Run,
    slice: usize,
    first_row: usize,
    args: &DecodeArgs,
    #[comptime] uniform: bool,
    #[comptime] bp: ChunkBlueprint,
) -> Array<f32> {
    let rows = comptime!(bp.blocks.rows);
    let unit_tokens = comptime!(bp.blocks.unit_tokens);
    let width = comptime!(bp.blocks.head_dim.keys / 4);
    let cache = &args.cache;
    let schedule = &cache.schedule;
    let sinks = schedule.sinks;
    let packed_keys = quantized(args.len, &schedule.keys, schedule);
    let token = tile.start + UNIT_POS as usize * unit_tokens;
    let mut scores = Array::<f32>::new(comptime!(bp.blocks.rows * bp.blocks.unit_tokens));
    #[unroll]
    for i in 0..comptime!(bp.blocks.rows * bp.blocks.unit_tokens) {
        scores[i] = f32::new(0.0);
    }
    if token < tile.end {
        let mut run = Array::<f32>::new(comptime!(4 * bp.blocks.unit_tokens));
        let mut bases = Array::<usize>::new(unit_tokens);
        if comptime!(bp.specs.keys.is_none() || !uniform) {
            #[unroll]
            for t in 0..unit_tokens {
                // Tokens past the end are read as the last one, and masked below.
                let at = clamp_max(token + t, tile.end - 1);
                bases[t] = (slice * cache.float_elements + float_element(at, &cache.keys)) / 4;
            }
        }
        let mut queries = Array::<usize>::new(rows);
        #[unroll]
        for r in 0..rows {
            // Rows past the last one repeat it, and are not written.
            let row = clamp_max(first_row + r, args.rows - 1);
            queries[r] = (slice * args.rows + row) * width;
        }
        for column in 0..width {
            let mut float = true;
            let spec = comptime!(bp.specs.keys);
            #[comptime]
            match spec {
                Some(spec) => {
                    let (base, side) = (slice * cache.keys.slice_words / 4, &cache.keys);
                    if comptime!(uniform) {
                        let (first, end) = (token - sinks, tile.end - sinks);
                        restore_keys::<N>(keys, base, first, end, column, &mut run, side, spec, bp);
                    } else if token >= sinks && token - sinks < packed_keys {
                        let (first, end) = (token - sinks, tile.end - sinks);
                        restore_keys::<N>(keys, base, first, end, column, &mut run, side, spec, bp);
                        float = false;
                    }
                }
                None => {}
            }
            if comptime!(bp.specs.keys.is_none() || !uniform) {
                if float {
                    #[unroll]
                    for t in 0..unit_tokens {
                        read_four::<R, N>(floats, bases[t] + column, &mut run, t);
                    }
                }
            }
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

/// Adds to the unit's outputs the values of `tile` with the weights that [`weigh`] has left.
#[cube]
#[allow(clippy::if_same_then_else, clippy::collapsible_if, reason = "decided when compiled")]
fn add_values<R: Float, N: Size>(
    values: &[u32],
    floats: &[Vector<R, N>],
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
    let cache = &args.cache;
    let schedule = &cache.schedule;
    let sinks = schedule.sinks;
    let packed_values = quantized(args.len, &schedule.values, schedule);
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
            let mut float = true;
            let spec = comptime!(bp.specs.values);
            #[comptime]
            match spec {
                Some(spec) => {
                    let (base, side) = (slice * cache.values.slice_words, &cache.values);
                    if comptime!(uniform) {
                        let token = token - sinks;
                        restore_value(
                            values,
                            base,
                            token,
                            state.block,
                            &mut run,
                            side,
                            t,
                            spec,
                            bp,
                        );
                    } else if token >= sinks && token - sinks < packed_values {
                        let token = token - sinks;
                        restore_value(
                            values,
                            base,
                            token,
                            state.block,
                            &mut run,
                            side,
                            t,
                            spec,
                            bp,
                        );
                        float = false;
                    }
                }
                None => {}
            }
            if comptime!(bp.specs.values.is_none() || !uniform) {
                if float {
                    let row = slice * cache.float_elements + float_element(token, &cache.values);
                    let fours = comptime!(bp.blocks.unit_channels / 4);
                    let at = row / 4 + state.block * fours;
                    #[unroll]
                    for i in 0..fours {
                        read_four::<R, N>(floats, at + i, &mut run, t * fours + i);
                    }
                }
            }
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
    keys: &[Vector<u32, N>],
    values: &[u32],
    floats: &[Vector<R, N>],
    tile: &Run,
    slice: usize,
    first_row: usize,
    state: &mut RowState<N>,
    args: &DecodeArgs,
    #[comptime] uniform: bool,
    #[comptime] bp: ChunkBlueprint,
) {
    let scores = score::<R, N>(query, keys, floats, tile, slice, first_row, args, uniform, bp);
    weigh::<N>(&scores, state, comptime!(bp.blocks));
    add_values::<R, N>(values, floats, tile, slice, state, args, uniform, bp);
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
    keys: &[Vector<u32, N>],
    values: &[u32],
    floats: &[Vector<R, N>],
    partials: &mut [f32],
    args: DecodeArgs,
    tiles: Tiles,
    #[comptime] bp: ChunkBlueprint,
    #[define(R)] _dtype: ElemType,
) {
    let head_dim = comptime!(bp.blocks.head_dim.values);
    let rows = comptime!(bp.blocks.rows);
    let units = comptime!(bp.blocks.units);
    let tile = comptime!(bp.blocks.tile());
    let unit = UNIT_POS as usize;
    let place = cube_at(args.slices, args.n_splits, comptime!(bp.flat));
    let (slice, split) = (place.x, place.y);
    let first_row = place.z * rows;
    if comptime!(bp.flat) {
        if first_row >= args.rows {
            terminate!();
        }
    }
    let mut state = new_rows::<N>(comptime!(bp.blocks));

    // Two loops, because tiles of old tokens need no branches, and some drivers run both sides of
    // every branch.
    let first = split * tiles.tiles_per_split;
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
        attend_tile::<R, N>(
            query, keys, values, floats, &tile, slice, first_row, &mut state, &args, true, bp,
        );
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
            attend_tile::<R, N>(
                query, keys, values, floats, &tile, slice, first_row, &mut state, &args, false, bp,
            );
        }
    }

    gather::<N>(&mut state, comptime!(bp.blocks));
    let rows_left = clamp_max(args.rows - first_row, rows);
    let first_partial = slice * args.rows + first_row;
    let mut r = unit;
    while r < rows_left {
        let base = ((first_partial + r) * args.n_splits + split) * (head_dim + 2);
        partials[base + head_dim] = maximum::<N>(&state, r);
        partials[base + head_dim + 1] = sum::<N>(&state, r, comptime!(bp.blocks));
        r += units;
    }
    let width = comptime!(bp.blocks.head_dim.values / 4);
    let mut i = unit;
    while i < rows_left * width {
        let (r, column) = (i / width, i % width);
        let total = output::<N>(&state, r, column, comptime!(bp.blocks));
        let base = ((first_partial + r) * args.n_splits + split) * (head_dim + 2) + column * 4;
        #[unroll]
        for k in 0..4usize {
            partials[base + k] = total.extract(k);
        }
        i += units;
    }
}
