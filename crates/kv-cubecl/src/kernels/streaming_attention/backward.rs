//! Gradients, with weights recomputed from the log-sum-exp (Dao et al., 2022).

use cubecl::prelude::*;

use super::kernel::{
    Block, KEYS, ROWS, StreamArgs, StreamBlueprint, dot, last_visible, quantized_end, score_of,
    sees, sinks, skip_hidden, visible,
};
use crate::kernels::grid::cube_at;

/// Keys per cube of [`keys_and_values`].
pub(super) const KEYS_PER_CUBE: usize = 4;
/// Query rows per step of [`keys_and_values`].
const ROWS_PER_STEP: usize = 32;

/// Inputs of the gradients.
#[derive(CubeType, CubeLaunch)]
pub(super) struct GradientInputs {
    pub(super) query: Box<[f32]>,
    /// The floats, then their restored form: `[2, slices, n, head_dim]` of keys.
    pub(super) keys: Box<[f32]>,
    /// Values, in the same order.
    pub(super) values: Box<[f32]>,
    /// Gradient of the output.
    pub(super) grad: Box<[f32]>,
    /// The log-sum-exp, then `sum_c output_c * grad_c`: `[2, heads, m]`.
    pub(super) stats: Box<[f32]>,
    pub(super) slices: usize,
}

/// First element of key or value `at`, in the restored half of its buffer if `hat`, else in the
/// float half.
#[cube]
fn element(at: usize, hat: bool, slice: usize, slices: usize, n: usize, head_dim: usize) -> usize {
    let mut row = slice * n + at;
    if hat {
        row += slices * n;
    }
    row * head_dim
}

/// Weight of a key that `row` sees, and the gradient of their score.
#[cube]
fn weight_and_gradient(
    inputs: &GradientInputs,
    head: usize,
    row: usize,
    at: usize,
    args: &StreamArgs,
    #[comptime] bp: StreamBlueprint,
) -> (f32, f32) {
    let key_dim = comptime!(bp.head_dim.keys);
    let value_dim = comptime!(bp.head_dim.values);
    let slice = head / args.n_rep;
    let row_of_all = head * args.m + row;
    let hat_key = at < quantized_end(row, &args.schedule.keys, args);
    let hat_value = at < quantized_end(row, &args.schedule.values, args);
    let k = element(at, hat_key, slice, inputs.slices, args.n, key_dim);
    let v = element(at, hat_value, slice, inputs.slices, args.n, value_dim);
    let product = dot::<f32>(&inputs.query, row_of_all * key_dim, &inputs.keys, k, key_dim);
    let score = score_of(product, args, bp.softcap);
    // A score exceeds its row's log-sum-exp only by rounding, which is large where scores are huge;
    // its weight is then 1. NaN stays NaN.
    let difference = score - inputs.stats[row_of_all];
    let p = select(difference > f32::new(0.0), f32::new(0.0), difference).exp();
    let dp = dot::<f32>(&inputs.grad, row_of_all * value_dim, &inputs.values, v, value_dim);
    let delta = inputs.stats[(inputs.slices * args.n_rep + head) * args.m + row];
    let mut d = p * (dp - delta) * args.scale;
    if comptime!(bp.softcap) {
        let bounded = score / args.softcap;
        d *= f32::new(1.0) - bounded * bounded;
    }
    (p, d)
}

/// Adds to the unit's channels of the gradients of the query, `[ROWS, channels]`, the keys from
/// `start` on, whose scores have the gradients `ds`.
#[cube]
fn add_keys(
    inputs: &GradientInputs,
    ds: &Shared<[f32]>,
    block: &Block,
    start: usize,
    acc: &mut Array<f32>,
    args: &StreamArgs,
    #[comptime] bp: StreamBlueprint,
) {
    let head_dim = comptime!(bp.head_dim.keys);
    let channels = comptime!(bp.channels(bp.head_dim.keys));
    let slice = block.head / args.n_rep;
    #[unroll]
    for i in 0..channels {
        let channel = UNIT_POS as usize + i * comptime!(bp.units);
        if channel < head_dim {
            #[unroll]
            for r in 0..ROWS {
                let row = block.first_row + r;
                let seen_hat = quantized_end(row, &args.schedule.keys, args);
                let end_of_row = visible(row, args);
                let mut sum = acc[r * channels + i];
                for t in 0..KEYS {
                    let at = start + t;
                    // Hidden tokens are left out: their gradient is 0, but 0 times infinity is not
                    // 0.
                    if sees(row, at, end_of_row, args, bp.window) {
                        let hat = at < seen_hat;
                        let k = element(at, hat, slice, inputs.slices, args.n, head_dim);
                        sum += ds[r * KEYS + t] * inputs.keys[k + channel];
                    }
                }
                acc[r * channels + i] = sum;
            }
        }
    }
}

/// Gradient of the query; one cube per (tile of rows, query head).
#[cube(launch, address_type = "dynamic")]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
pub(super) fn queries(
    inputs: GradientInputs,
    out: &mut [f32],
    args: StreamArgs,
    #[comptime] bp: StreamBlueprint,
) {
    let head_dim = comptime!(bp.head_dim.keys);
    let units = comptime!(bp.units);
    let channels = comptime!(bp.channels(bp.head_dim.keys));
    let unit = UNIT_POS as usize;
    let place = cube_at(args.m.div_ceil(ROWS), args.heads, comptime!(bp.flat));
    let block = Block { head: place.y, first_row: place.x * ROWS };
    let (head, first_row) = (block.head, block.first_row);
    if comptime!(bp.flat) {
        if place.z > 0 {
            terminate!();
        }
    }
    let mut ds = Shared::<[f32]>::new_slice(comptime!(ROWS * KEYS));
    let mut acc = Array::<f32>::new(comptime!(ROWS * bp.channels(bp.head_dim.keys)));
    #[unroll]
    for i in 0..comptime!(ROWS * bp.channels(bp.head_dim.keys)) {
        acc[i] = f32::new(0.0);
    }
    let end = last_visible(first_row, &args);
    let mut start = skip_hidden(0usize, first_row, &args, bp.window);
    while start < end {
        let mut i = unit;
        while i < comptime!(ROWS * KEYS) {
            let row = first_row + i / KEYS;
            let at = start + i % KEYS;
            let mut d = f32::new(0.0);
            if row < args.m && sees(row, at, visible(row, &args), &args, bp.window) {
                let pair = weight_and_gradient(&inputs, head, row, at, &args, bp);
                d = pair.1;
            }
            ds[i] = d;
            i += units;
        }
        sync_cube();
        add_keys(&inputs, &ds, &block, start, &mut acc, &args, bp);
        sync_cube();
        start = skip_hidden(start + KEYS, first_row, &args, bp.window);
    }
    #[unroll]
    for r in 0..ROWS {
        let row = first_row + r;
        if row < args.m {
            #[unroll]
            for i in 0..channels {
                let channel = unit + i * units;
                if channel < head_dim {
                    out[(head * args.m + row) * head_dim + channel] = acc[r * channels + i];
                }
            }
        }
    }
}

/// Adds to the unit's gradients, `[channels, KEYS_PER_CUBE, 4]`, those of the rows from `start` on,
/// whose weights and gradients of scores are `ps` and `ds`. Rows that do not see a key add nothing
/// to it; 0 times infinity is not 0.
#[cube]
fn add_rows(
    inputs: &GradientInputs,
    ps: &Shared<[f32]>,
    ds: &Shared<[f32]>,
    head: usize,
    start: usize,
    first_key: usize,
    acc: &mut Array<f32>,
    args: &StreamArgs,
    #[comptime] bp: StreamBlueprint,
) {
    let key_dim = comptime!(bp.head_dim.keys);
    let value_dim = comptime!(bp.head_dim.values);
    let channels = comptime!(bp.widest_channels());
    let sides = comptime!(4 * KEYS_PER_CUBE);
    for r in 0..ROWS_PER_STEP {
        let row = start + r;
        if row < args.m {
            let hat_keys = quantized_end(row, &args.schedule.keys, args);
            let hat_values = quantized_end(row, &args.schedule.values, args);
            let end = visible(row, args);
            #[unroll]
            for i in 0..channels {
                let channel = UNIT_POS as usize + i * comptime!(bp.units);
                if channel < key_dim {
                    let q = inputs.query[(head * args.m + row) * key_dim + channel];
                    #[unroll]
                    for t in 0..KEYS_PER_CUBE {
                        let at = first_key + t;
                        let dk = ds[r * KEYS_PER_CUBE + t] * q;
                        let dk = select(sees(row, at, end, args, bp.window), dk, f32::new(0.0));
                        if at < hat_keys {
                            acc[i * sides + t * 4 + 1] += dk;
                        } else {
                            acc[i * sides + t * 4] += dk;
                        }
                    }
                }
                if channel < value_dim {
                    let g = inputs.grad[(head * args.m + row) * value_dim + channel];
                    #[unroll]
                    for t in 0..KEYS_PER_CUBE {
                        let at = first_key + t;
                        let dv = ps[r * KEYS_PER_CUBE + t] * g;
                        let dv = select(sees(row, at, end, args, bp.window), dv, f32::new(0.0));
                        if at < hat_values {
                            acc[i * sides + t * 4 + 3] += dv;
                        } else {
                            acc[i * sides + t * 4 + 2] += dv;
                        }
                    }
                }
            }
        }
    }
}

/// Returns the first row that sees the first key of a cube, and one past the last row that sees one
/// of its keys.
#[cube]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
fn rows_that_see(first_key: usize, args: &StreamArgs, #[comptime] window: bool) -> (usize, usize) {
    let mut first_row = 0usize;
    if args.first_key + first_key > args.first_query {
        first_row = args.first_key + first_key - args.first_query;
    }
    let mut end_row = args.m;
    // All rows see sinks.
    if comptime!(window) {
        if first_key >= sinks(args) {
            let last = args.first_key + first_key + KEYS_PER_CUBE + args.schedule.sliding_window;
            if last < args.first_query + end_row {
                end_row = last - clamp_max(args.first_query, last);
            }
        }
    }
    (first_row, end_row)
}

/// Gradients of key, key_hat, value and value_hat, `out` one after the
/// other, each `[slices, n, head_dim]`; one cube per (tile of keys, slice).
#[cube(launch, address_type = "dynamic")]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
pub(super) fn keys_and_values(
    inputs: GradientInputs,
    out: &mut [f32],
    args: StreamArgs,
    #[comptime] bp: StreamBlueprint,
) {
    let units = comptime!(bp.units);
    let unit = UNIT_POS as usize;
    let place = cube_at(args.n.div_ceil(KEYS_PER_CUBE), inputs.slices, comptime!(bp.flat));
    let slice = place.y;
    let first_key = place.x * KEYS_PER_CUBE;
    if comptime!(bp.flat) {
        if place.z > 0 {
            terminate!();
        }
    }
    let mut ps = Shared::<[f32]>::new_slice(comptime!(ROWS_PER_STEP * KEYS_PER_CUBE));
    let mut ds = Shared::<[f32]>::new_slice(comptime!(ROWS_PER_STEP * KEYS_PER_CUBE));
    // Gradients, `[channels, KEYS_PER_CUBE, 4]`: of key, key_hat, value and value_hat.
    let mut acc = Array::<f32>::new(comptime!(4 * KEYS_PER_CUBE * bp.widest_channels()));
    #[unroll]
    for i in 0..comptime!(4 * KEYS_PER_CUBE * bp.widest_channels()) {
        acc[i] = f32::new(0.0);
    }
    let (first_row, end_row) = rows_that_see(first_key, &args, bp.window);
    for rep in 0..args.n_rep {
        let head = slice * args.n_rep + rep;
        let mut start = first_row;
        while start < end_row {
            let mut i = unit;
            while i < comptime!(ROWS_PER_STEP * KEYS_PER_CUBE) {
                let row = start + i / KEYS_PER_CUBE;
                let at = first_key + i % KEYS_PER_CUBE;
                let mut p = f32::new(0.0);
                let mut d = f32::new(0.0);
                if row < args.m && sees(row, at, visible(row, &args), &args, bp.window) {
                    let pair = weight_and_gradient(&inputs, head, row, at, &args, bp);
                    p = pair.0;
                    d = pair.1;
                }
                ps[i] = p;
                ds[i] = d;
                i += units;
            }
            sync_cube();
            add_rows(&inputs, &ps, &ds, head, start, first_key, &mut acc, &args, bp);
            sync_cube();
            start += ROWS_PER_STEP;
        }
    }
    write_sides(out, &acc, slice, first_key, &inputs, &args, bp);
}

/// Writes the unit's gradients, `[channels, KEYS_PER_CUBE, 4]`.
#[cube]
fn write_sides(
    out: &mut [f32],
    acc: &Array<f32>,
    slice: usize,
    first_key: usize,
    inputs: &GradientInputs,
    args: &StreamArgs,
    #[comptime] bp: StreamBlueprint,
) {
    let key_dim = comptime!(bp.head_dim.keys);
    let value_dim = comptime!(bp.head_dim.values);
    let channels = comptime!(bp.widest_channels());
    let sides = comptime!(4 * KEYS_PER_CUBE);
    #[unroll]
    for t in 0..KEYS_PER_CUBE {
        let at = first_key + t;
        if at < args.n {
            #[unroll]
            for i in 0..channels {
                let channel = UNIT_POS as usize + i * comptime!(bp.units);
                #[unroll]
                for hat in 0..2usize {
                    let row = (hat * inputs.slices + slice) * args.n + at;
                    if channel < key_dim {
                        out[row * key_dim + channel] = acc[i * sides + t * 4 + hat];
                    }
                    if channel < value_dim {
                        let first = 2 * inputs.slices * args.n * key_dim;
                        out[first + row * value_dim + channel] = acc[i * sides + t * 4 + 2 + hat];
                    }
                }
            }
        }
    }
}
