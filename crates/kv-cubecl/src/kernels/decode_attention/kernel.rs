use cubecl::prelude::*;

use super::{
    args::DecodeArgs,
    base::DecodeBlueprint,
    score::{score_float, score_packed},
};
use crate::kernels::{
    codec::{code_at, min_of, scale_of},
    grid::cube_at,
    layout::{float_element, quantized},
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
struct Extent {
    tokens: usize,
    /// Tokens after the sinks whose keys are packed.
    packed_keys: usize,
    /// Tokens after the sinks whose values are packed.
    packed_values: usize,
    /// First tile of the split, and one past its last.
    first_tile: usize,
    last_tile: usize,
}

/// The share of `split`: a run of tiles; the last splits may get none.
#[cube]
fn extent_of(
    slice: usize,
    split: usize,
    position: &ComptimeOption<Box<[i32]>>,
    args: &DecodeArgs,
    #[comptime] bp: DecodeBlueprint,
) -> Extent {
    let tile = comptime!(bp.tile());
    let mut len = args.len;
    let mut tokens = args.tokens;
    #[comptime]
    match position {
        ComptimeOption::Some(position) => {
            // A full cache stays as it is.
            let position = position[slice / args.position_slices] as usize;
            len = clamp_max(position, args.cache.capacity - 1) + 1;
            tokens = len;
        }
        ComptimeOption::None => {}
    }
    let schedule = &args.cache.schedule;
    let sinks = clamp_max(schedule.sinks, tokens);
    let packed_keys = clamp_max(quantized(len, &schedule.keys, schedule), tokens - sinks);
    let packed_values = quantized(len, &schedule.values, schedule);
    let windowed = tokens - sinks - packed_keys;
    let n_tiles = sinks.div_ceil(tile) + packed_keys.div_ceil(tile) + windowed.div_ceil(tile);
    let share = n_tiles.div_ceil(args.n_splits);
    let first_tile = split * share;
    let last_tile = clamp_max(first_tile + share, n_tiles);
    Extent { tokens, packed_keys, packed_values, first_tile, last_tile }
}

/// Consecutive tokens that are handled together, their keys all in one form.
#[derive(CubeType)]
struct Tile {
    /// First token.
    start: usize,
    /// One past the last.
    end: usize,
    /// Whether the tokens come after the sinks.
    windowed: bool,
    /// Whether their keys are packed.
    packed: bool,
}

/// Tile `index`: those of sinks come first, then those of packed keys, then the window.
#[cube]
fn tile_at(
    index: usize,
    extent: &Extent,
    args: &DecodeArgs,
    #[comptime] bp: DecodeBlueprint,
) -> Tile {
    let tile = comptime!(bp.tile());
    let sinks = clamp_max(args.cache.schedule.sinks, extent.tokens);
    let sink_tiles = sinks.div_ceil(tile);
    let packed_tiles = extent.packed_keys.div_ceil(tile);
    let windowed = index >= sink_tiles;
    let packed = windowed && index < sink_tiles + packed_tiles;
    let mut start = index * tile;
    let mut limit = sinks;
    if packed {
        start = sinks + (index - sink_tiles) * tile;
        limit = sinks + extent.packed_keys;
    } else if windowed {
        start = sinks + extent.packed_keys + (index - sink_tiles - packed_tiles) * tile;
        limit = extent.tokens;
    }
    let end = clamp_max(start + tile, limit);
    Tile { start, end, windowed, packed }
}

/// Replaces `values` `[rows]`, one value per row of this unit, by the largest of all units of the
/// cube. Contains a barrier.
#[cube]
fn cube_max(
    values: &mut Array<f32>,
    stats: &mut Shared<[f32]>,
    unit: usize,
    #[comptime] bp: DecodeBlueprint,
) {
    let rows = comptime!(bp.rows);
    let entries = comptime!(bp.stat_entries());
    #[unroll]
    for r in 0..rows {
        if comptime!(bp.plane > 1) {
            let largest = plane_max(values[r]);
            if unit.is_multiple_of(bp.plane) {
                stats[r * entries + unit / bp.plane] = largest;
            }
        } else {
            stats[r * entries + unit] = values[r];
        }
    }
    sync_cube();
    #[unroll]
    for r in 0..rows {
        let mut largest = stats[r * entries];
        for i in 1..entries {
            largest = clamp_min(largest, stats[r * entries + i]);
        }
        values[r] = largest;
    }
}

/// One cube per (slice, split, chunk of query rows); writes `(o, m, l)` of each row to
/// `partials` `[slices, rows, n_splits, head_dim + 2]`, with the head_dim of values.
///
/// Keys: a unit takes `unit_tokens` consecutive tokens and every `lanes`-th vector of their
/// channels. Values: a unit takes `unit_channels` consecutive channels and every `strides`-th
/// token.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
pub(super) fn partial_attention<R: Float, Q: Float, N: Size>(
    query: &[Q],
    keys: &[Vector<u32, N>],
    values: &[u32],
    floats: &[Vector<R, N>],
    partials: &mut [f32],
    position: ComptimeOption<Box<[i32]>>,
    args: DecodeArgs,
    #[comptime] bp: DecodeBlueprint,
    #[define(R)] _dtype: ElemType,
    #[define(Q)] _query_type: ElemType,
) {
    let key_dim = comptime!(bp.head_dim.keys);
    let value_dim = comptime!(bp.head_dim.values);
    let rows = comptime!(bp.rows);
    let tile_len = comptime!(bp.tile());
    let units = comptime!(bp.units);
    let unit_tokens = comptime!(bp.unit_tokens);
    let unit_channels = comptime!(bp.unit_channels);
    let blocks = comptime!(bp.head_dim.values / bp.unit_channels);
    let strides = comptime!(bp.strides());

    let unit = UNIT_POS as usize;
    let place = cube_at(args.slices, args.n_splits, comptime!(bp.flat));
    let (slice, split) = (place.x, place.y);
    let first_row = place.z * rows;
    if comptime!(bp.flat) {
        if first_row >= args.rows {
            terminate!();
        }
    }

    let mut scaled = Shared::<[f32]>::new_slice(rows * key_dim);
    // Scores of a tile, then their weights; at the end, outputs to be added up.
    let mut scratch = Shared::<[f32]>::new_slice(comptime!(bp.scratch_len()));
    let mut stats = Shared::<[f32]>::new_slice(comptime!(bp.rows * bp.stat_entries()));

    let mut i = unit;
    while i < rows * key_dim {
        let row = first_row + i / key_dim;
        let mut q = f32::new(0.0);
        if row < args.rows {
            let at = (slice * args.rows + row) * key_dim + i % key_dim;
            q = f32::cast_from(query[at]) * args.scale;
        }
        scaled[i] = q;
        i += units;
    }

    let mut maxima = Array::<f32>::new(rows);
    let mut sums = Array::<f32>::new(rows);
    let mut o = Array::<f32>::new(comptime!(bp.rows * bp.unit_channels));
    // Per row, the sum of weight times minimum. It is the same for all of the unit's channels,
    // which lie in one group.
    let mut offset = Array::<f32>::new(rows);
    #[unroll]
    for r in 0..rows {
        maxima[r] = f32::new(LOWEST);
    }
    sync_cube();

    let float_base = slice * args.cache.float_elements;
    let lane = unit % bp.lanes;
    let block = unit % blocks;
    let stride = unit / blocks;
    let extent = extent_of(slice, split, &position, &args, bp);
    for index in extent.first_tile..extent.last_tile {
        let tile = tile_at(index, &extent, &args, bp);

        let first = unit / bp.lanes * unit_tokens;
        let token = tile.start + first;
        let mut scores = Array::<f32>::new(comptime!(bp.rows * bp.unit_tokens));
        if token < tile.end {
            if comptime!(bp.key_bits > 0) {
                if tile.packed {
                    score_packed::<N>(
                        keys,
                        slice * args.cache.keys.slice_words / comptime!(bp.vector),
                        token - args.cache.schedule.sinks,
                        lane,
                        &scaled,
                        &mut scores,
                        bp,
                    );
                }
            }
            if !tile.packed {
                let end = tile.end;
                score_float::<R, N>(
                    floats,
                    float_base,
                    token,
                    end,
                    lane,
                    &scaled,
                    &mut scores,
                    &args.cache.keys,
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
        let mut largest = Array::<f32>::new(rows);
        #[unroll]
        for r in 0..rows {
            largest[r] = maxima[r];
            #[unroll]
            for t in 0..unit_tokens {
                // All lanes of a token have its sums now; each writes a share of the scores.
                let mine = t % comptime!(bp.lanes) == lane;
                if mine {
                    let mut score = scores[r * unit_tokens + t];
                    if token + t >= tile.end {
                        score = f32::new(LOWEST);
                    }
                    largest[r] = clamp_min(largest[r], score);
                    scratch[r * tile_len + first + t] = score;
                }
            }
        }
        cube_max(&mut largest, &mut stats, unit, bp);
        #[unroll]
        for r in 0..rows {
            let factor = (maxima[r] - largest[r]).exp();
            maxima[r] = largest[r];
            sums[r] *= factor;
            offset[r] *= factor;
            #[unroll]
            for c in 0..unit_channels {
                o[r * unit_channels + c] *= factor;
            }
            // The barrier in `cube_max` came after all scores of the tile were written.
            let mut t = unit;
            while t < tile_len {
                let weight = weight_of(scratch[r * tile_len + t], largest[r]);
                scratch[r * tile_len + t] = weight;
                sums[r] += weight;
                t += units;
            }
        }
        sync_cube();

        if stride < strides {
            let mut token = tile.start + stride;
            while token < tile.end {
                let at = token - tile.start;
                let mut packed = false;
                if comptime!(bp.value_bits > 0) {
                    packed =
                        tile.windowed && token - args.cache.schedule.sinks < extent.packed_values;
                    if packed {
                        let codes = comptime!(bp.value_codes());
                        let n_words = comptime!(bp.head_dim.values / bp.value_codes());
                        let line_len = comptime!(
                            bp.head_dim.values / bp.value_codes()
                                + bp.head_dim.values / bp.group_size
                        );
                        let line = slice * args.cache.values.slice_words
                            + (token - args.cache.schedule.sinks) * line_len;
                        let param = values[line + n_words + block * unit_channels / bp.group_size];
                        let scale = scale_of(param);
                        let min = min_of(param);
                        let mut weights = Array::<f32>::new(rows);
                        #[unroll]
                        for r in 0..rows {
                            let weight = scratch[r * tile_len + at];
                            weights[r] = weight * scale;
                            offset[r] += weight * min;
                        }
                        #[unroll]
                        for i in 0..comptime!(bp.unit_channels / bp.value_codes()) {
                            let word = values[line + block * (unit_channels / codes) + i];
                            #[unroll]
                            for j in 0..codes {
                                let code = code_at(word, j, bp.value_bits);
                                #[unroll]
                                for r in 0..rows {
                                    o[r * unit_channels + i * codes + j] += weights[r] * code;
                                }
                            }
                        }
                    }
                }
                if !packed {
                    let row = float_base + float_element(token, &args.cache.values);
                    let line = row / comptime!(bp.vector)
                        + block * comptime!(bp.unit_channels / bp.vector);
                    #[unroll]
                    for i in 0..comptime!(bp.unit_channels / bp.vector) {
                        let value = floats[line + i];
                        #[unroll]
                        for k in 0..comptime!(bp.vector) {
                            let channel = f32::cast_from(value.extract(k));
                            #[unroll]
                            for r in 0..rows {
                                o[r * unit_channels + i * bp.vector + k] +=
                                    scratch[r * tile_len + at] * channel;
                            }
                        }
                    }
                }
                token += strides;
            }
        }
        sync_cube();
    }

    // Adds up the units' outputs and sums, one row at a time.
    let entries = comptime!(bp.units);
    #[unroll]
    for r in 0..rows {
        if stride < strides {
            #[unroll]
            for c in 0..unit_channels {
                scratch[stride * value_dim + block * unit_channels + c] =
                    o[r * unit_channels + c] + offset[r];
            }
        }
        scratch[strides * value_dim + unit] = sums[r];
        sync_cube();
        let row = first_row + r;
        if row < args.rows {
            let base = ((slice * args.rows + row) * args.n_splits + split) * (value_dim + 2);
            let mut c = unit;
            while c < value_dim {
                let mut total = f32::new(0.0);
                for i in 0..strides {
                    total += scratch[i * value_dim + c];
                }
                partials[base + c] = total;
                c += units;
            }
            if unit == 0 {
                let mut total = f32::new(0.0);
                for i in 0..entries {
                    total += scratch[strides * value_dim + i];
                }
                partials[base + value_dim] = maxima[r];
                partials[base + value_dim + 1] = total;
            }
        }
        sync_cube();
    }
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
        output[ABSOLUTE_POS] = Q::cast_from(out / sum);
        if channel == 0 {
            lse[row] = maximum + sum.ln();
        }
    }
}
