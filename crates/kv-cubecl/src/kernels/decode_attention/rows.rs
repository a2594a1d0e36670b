//! The query rows of a cube: what its units share and sum up over the tiles of a split.

use cubecl::prelude::*;

use super::{
    DOWN,
    args::DecodeArgs,
    base::DecodeBlueprint,
    tiles::{LOWEST, Tile, weight_of},
};
use crate::{
    kernels::{
        hadamard::{hadamard_rows, hadamard_scale},
        layout::newest_position,
        rope::apply_rope,
    },
    layout::QuantSpec,
};

/// Memory that the units of a cube share, and the sums that each unit keeps.
#[derive(CubeType)]
pub(super) struct Rows {
    /// The query, scaled, `[rows, head_dim]`.
    pub(super) query: Shared<[f32]>,
    /// Scores of a tile, then their weights; at the end, outputs to be added up.
    pub(super) scratch: Shared<[f32]>,
    /// For reductions, `[rows, stat_entries]`.
    stats: Shared<[f32]>,
    /// Largest score so far of each row.
    maxima: Array<f32>,
    /// The unit's part of the sum of weights.
    pub(super) sums: Array<f32>,
    /// The unit's part of the outputs, `[rows, unit_channels]`.
    pub(super) outputs: Array<f32>,
    /// Per row, the sum of weight times offset. It is the same for all of the unit's channels,
    /// which lie in one group.
    pub(super) offsets: Array<f32>,
    /// The factors of the unit's channels in a tile of values, and the first word of the factors of
    /// this tile.
    pub(super) factors: Array<f32>,
    pub(super) factors_from: Array<u32>,
    pub(super) unit: usize,
    /// Index of the unit's share of a token's channels in the scores.
    pub(super) lane: usize,
    /// Index of the block of channels that the unit sums.
    pub(super) block: usize,
    /// Index of the unit among those that share its block of channels.
    pub(super) stride: usize,
}

#[cube]
pub(super) fn new_rows(#[comptime] bp: DecodeBlueprint) -> Rows {
    let rows = comptime!(bp.rows);
    let blocks = comptime!(bp.head_dim.values / bp.unit_channels);
    let unit = UNIT_POS as usize;
    let mut maxima = Array::<f32>::new(rows);
    #[unroll]
    for r in 0..rows {
        maxima[r] = f32::new(LOWEST);
    }
    let mut factors_from = Array::<u32>::new(1usize);
    // No tile begins here.
    factors_from[0] = u32::MAX.runtime();
    Rows {
        query: Shared::<[f32]>::new_slice(comptime!(bp.rows * bp.head_dim.keys)),
        scratch: Shared::<[f32]>::new_slice(comptime!(bp.scratch_len())),
        stats: Shared::<[f32]>::new_slice(comptime!(bp.rows * bp.stat_entries())),
        maxima,
        sums: zeros(rows),
        outputs: zeros(comptime!(bp.rows * bp.unit_channels)),
        offsets: zeros(rows),
        factors: zeros(comptime!(match bp.specs.values {
            Some(QuantSpec { tile: Some(_), .. }) => bp.unit_channels,
            _ => 1,
        })),
        factors_from,
        unit,
        lane: unit % comptime!(bp.lanes),
        block: unit % blocks,
        stride: unit / blocks,
    }
}

/// An array of zeros.
#[cube]
pub(super) fn zeros(#[comptime] len: usize) -> Array<f32> {
    let mut array = Array::<f32>::new(len);
    #[unroll]
    for i in 0..len {
        array[i] = f32::new(0.0);
    }
    array
}

/// Scales the cube's rows of the query, after rope by the position of the newest token if there is
/// a table, and the Hadamard transform if keys are stored after it; those past the last are
/// zeros. Ends with a barrier.
#[cube]
pub(super) fn load_query<Q: Float>(
    query: &[Q],
    state: &mut Rows,
    slice: usize,
    first_row: usize,
    tokens: usize,
    args: &DecodeArgs,
    #[comptime] bp: DecodeBlueprint,
) {
    let key_dim = comptime!(bp.head_dim.keys);
    let n = comptime!(bp.rows * bp.head_dim.keys);
    let mut scale = args.scale;
    if comptime!(bp.hadamard.keys) {
        scale *= comptime!(hadamard_scale(bp.head_dim.keys));
    }
    // A full cache has fewer tokens than a position says.
    let position = newest_position(slice, &args.positions, clamp_min(tokens, 1) - 1);
    let mut i = state.unit;
    while i < n {
        let row = first_row + i / key_dim;
        let mut q = f32::new(0.0);
        if row < args.rows {
            let at = (slice * args.rows + row) * key_dim;
            q = apply_rope::<Q>(query, at, i % key_dim, position, &args.rope) * scale;
        }
        state.query[i] = q;
        i += comptime!(bp.units);
    }
    if comptime!(bp.hadamard.keys) {
        hadamard_rows(&mut state.query, state.unit, comptime!(bp.units), n, key_dim);
    } else {
        sync_cube();
    }
}

/// Replaces `values` `[rows]`, one value per row of this unit, by the largest of all units of the
/// cube. Contains a barrier.
#[cube]
fn cube_max(values: &mut Array<f32>, state: &mut Rows, #[comptime] bp: DecodeBlueprint) {
    let rows = comptime!(bp.rows);
    let entries = comptime!(bp.stat_entries());
    #[unroll]
    for r in 0..rows {
        if comptime!(bp.plane > 1) {
            let largest = plane_max(values[r]);
            if state.unit.is_multiple_of(bp.plane) {
                state.stats[r * entries + state.unit / bp.plane] = largest;
            }
        } else {
            state.stats[r * entries + state.unit] = values[r];
        }
    }
    sync_cube();
    #[unroll]
    for r in 0..rows {
        let mut largest = state.stats[r * entries];
        for i in 1..entries {
            largest = clamp_min(largest, state.stats[r * entries + i]);
        }
        values[r] = largest;
    }
}

/// Turns the scores of the unit's run of tokens, `[rows, unit_tokens]`, into weights in shared
/// memory, and scales the sums so far to the new maxima. Ends with a barrier, after which all
/// weights of the tile may be read.
#[cube]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
pub(super) fn weigh(
    scores: &Array<f32>,
    tile: &Tile,
    state: &mut Rows,
    #[comptime] bp: DecodeBlueprint,
) {
    let rows = comptime!(bp.rows);
    let unit_tokens = comptime!(bp.unit_tokens);
    let unit_channels = comptime!(bp.unit_channels);
    let tile_len = comptime!(bp.tile());
    let first = state.unit / bp.lanes * unit_tokens;
    let token = tile.start + first;
    let mut largest = Array::<f32>::new(rows);
    #[unroll]
    for r in 0..rows {
        largest[r] = state.maxima[r];
        #[unroll]
        for t in 0..unit_tokens {
            // All lanes of a token have its sums now; each writes a share of the scores.
            let mine = t % comptime!(bp.lanes) == state.lane;
            if mine {
                let mut score = scores[r * unit_tokens + t];
                if token + t >= tile.end {
                    score = f32::new(LOWEST);
                }
                if comptime!(bp.window) {
                    if token + t < tile.begin {
                        score = f32::new(LOWEST);
                    }
                }
                largest[r] = clamp_min(largest[r], score);
                state.scratch[r * tile_len + first + t] = score;
            }
        }
    }
    cube_max(&mut largest, state, bp);
    #[unroll]
    for r in 0..rows {
        let factor = (state.maxima[r] - largest[r]).exp();
        state.maxima[r] = largest[r];
        state.sums[r] *= factor;
        state.offsets[r] *= factor;
        #[unroll]
        for c in 0..unit_channels {
            state.outputs[r * unit_channels + c] *= factor;
        }
        // The barrier in `cube_max` came after all scores of the tile were written.
        let mut t = state.unit;
        while t < tile_len {
            let weight = weight_of(state.scratch[r * tile_len + t], largest[r]);
            state.scratch[r * tile_len + t] = weight * f32::new(DOWN);
            state.sums[r] += weight;
            t += comptime!(bp.units);
        }
    }
    sync_cube();
}

/// Adds up the units' outputs and sums, one row at a time, into `(o, m, l)` of the split; or, if it
/// is the whole, into the output, whose Hadamard transform is undone, and its log-sum-exp.
#[cube]
pub(super) fn write_rows(
    results: &mut [f32],
    lse: &mut [f32],
    state: &mut Rows,
    slice: usize,
    split: usize,
    first_row: usize,
    args: &DecodeArgs,
    #[comptime] bp: DecodeBlueprint,
) {
    let value_dim = comptime!(bp.head_dim.values);
    let unit_channels = comptime!(bp.unit_channels);
    let units = comptime!(bp.units);
    let strides = comptime!(bp.strides());
    #[unroll]
    for r in 0..comptime!(bp.rows) {
        if state.stride < strides {
            #[unroll]
            for c in 0..unit_channels {
                let at = state.stride * value_dim + state.block * unit_channels + c;
                state.scratch[at] = state.outputs[r * unit_channels + c] + state.offsets[r];
            }
        }
        state.scratch[strides * value_dim + state.unit] = state.sums[r];
        sync_cube();
        let mut sum = f32::new(0.0);
        if comptime!(bp.whole) || state.unit == 0 {
            for i in 0..units {
                sum += state.scratch[strides * value_dim + i];
            }
        }
        let mut c = state.unit;
        while c < value_dim {
            // Only this unit reads column `c`.
            let mut total = state.scratch[c];
            for i in 1..strides {
                total += state.scratch[i * value_dim + c];
            }
            if comptime!(bp.whole) {
                total = normalized(total, sum);
            }
            state.scratch[c] = total;
            c += units;
        }
        if comptime!(bp.whole && bp.hadamard.values) {
            hadamard_rows(&mut state.scratch, state.unit, units, value_dim, value_dim);
        }
        let row = first_row + r;
        if row < args.rows {
            let row = slice * args.rows + row;
            let mut base = row * value_dim;
            if comptime!(!bp.whole) {
                base = (row * args.n_splits + split) * (value_dim + 2);
            }
            let mut c = state.unit;
            while c < value_dim {
                let mut total = state.scratch[c];
                if comptime!(bp.whole && bp.hadamard.values) {
                    total *= comptime!(hadamard_scale(bp.head_dim.values));
                }
                results[base + c] = total;
                c += units;
            }
            if state.unit == 0 {
                if comptime!(bp.whole) {
                    lse[row] = log_sum_exp(state.maxima[r], sum);
                } else {
                    results[base + value_dim] = state.maxima[r];
                    results[base + value_dim + 1] = sum;
                }
            }
        }
        sync_cube();
    }
}

/// The output of a row: its sum of values, whose weights were multiplied with [`DOWN`], over its
/// sum of weights; 0 for a sequence that takes no part, whose sum of weights is below 0.
#[cube]
pub(super) fn normalized(output: f32, sum: f32) -> f32 {
    let mut normalized = output / (sum * f32::new(DOWN));
    // A NaN stays one.
    if sum < 0.0 {
        normalized = f32::new(0.0);
    }
    normalized
}

/// The log-sum-exp of scores of this maximum and sum of weights; -inf for a sequence that takes no
/// part.
#[cube]
pub(super) fn log_sum_exp(maximum: f32, sum: f32) -> f32 {
    let mut lse = maximum + sum.ln();
    if sum < 0.0 {
        // Twice the lowest number is -inf, for which WGSL has no literal.
        lse = maximum + maximum;
    }
    lse
}
