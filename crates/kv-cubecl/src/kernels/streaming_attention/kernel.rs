use cubecl::prelude::*;

use crate::{
    kernels::{
        decode_attention::{DOWN, LOWEST, weight_of},
        grid::cube_at,
        layout::{ScheduleArgs, SideScheduleArgs, begin, quantized},
        scores::softcap,
    },
    layout::Sides,
};

/// Query rows per cube.
pub(super) const ROWS: usize = 8;
/// Keys per step.
pub(super) const KEYS: usize = 32;

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct StreamBlueprint {
    /// Channels of queries and keys, and of values.
    pub(super) head_dim: Sides<usize>,
    pub(super) units: usize,
    /// See [`Grid::flat`](crate::kernels::Grid::flat).
    pub(super) flat: bool,
    /// True if a sliding window may hide tokens.
    pub(super) window: bool,
    /// True if scores have a soft cap.
    pub(super) softcap: bool,
}

impl StreamBlueprint {
    /// Channels of a row of `head_dim` that a unit works on.
    pub(super) fn channels(&self, head_dim: usize) -> usize {
        head_dim.div_ceil(self.units)
    }

    /// Returns the channels per unit for the wider of keys and values.
    pub(super) fn widest_channels(&self) -> usize {
        self.channels(self.head_dim.keys.max(self.head_dim.values))
    }
}

/// Run-time numbers of a launch.
#[derive(CubeType, CubeLaunch)]
pub(super) struct StreamArgs {
    /// Query rows of a head.
    pub(super) m: usize,
    /// Keys of a slice.
    pub(super) n: usize,
    /// Query heads of all sequences together.
    pub(super) heads: usize,
    /// Query heads per kv head.
    pub(super) n_rep: usize,
    pub(super) first_query: usize,
    pub(super) first_key: usize,
    pub(super) schedule: ScheduleArgs,
    pub(super) scale: f32,
    /// Soft cap of the scores, if there is one.
    pub(super) softcap: f32,
}

/// The query, keys and values, each as stored and as restored.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Inputs<Q: CubePrimitive, S: CubePrimitive> {
    pub(super) query: Box<[Q]>,
    pub(super) key: Box<[S]>,
    pub(super) key_hat: Box<[S]>,
    pub(super) value: Box<[S]>,
    pub(super) value_hat: Box<[S]>,
}

/// The query rows of a cube.
#[derive(CubeType)]
pub(super) struct Block {
    /// Query head, of those of all sequences together.
    pub(super) head: usize,
    pub(super) first_row: usize,
}

/// Number of keys or values, from the first, that `row` sees quantized: `quantized_keys_end` or
/// `quantized_values_end` of its [`RowView`](crate::layout::RowView).
#[cube]
pub(super) fn quantized_end(row: usize, side: &SideScheduleArgs, args: &StreamArgs) -> usize {
    let count = quantized(args.first_query + row + 1, side, &args.schedule);
    let mut end = 0usize;
    if count > 0 && args.schedule.sinks + count > args.first_key {
        end = args.schedule.sinks + count - args.first_key;
    }
    end
}

/// Number of keys and values that `row` sees: `end` of its [`RowView`](crate::layout::RowView).
#[cube]
pub(super) fn visible(row: usize, args: &StreamArgs) -> usize {
    let mut end = args.first_query + row + 1 - args.first_key;
    if end > args.n {
        end = args.n;
    }
    end
}

/// The first key and value past the sinks that `row` sees: `begin` of its
/// [`RowView`](crate::layout::RowView).
#[cube]
pub(super) fn begin_of(row: usize, args: &StreamArgs) -> usize {
    let token = begin(args.first_query + row + 1, &args.schedule);
    let mut at = 0usize;
    if token > args.first_key {
        at = token - args.first_key;
    }
    at
}

/// Keys and values of sinks: [`StreamSpec::sinks`](crate::layout::StreamSpec::sinks).
#[cube]
pub(super) fn sinks(args: &StreamArgs) -> usize {
    let mut sinks = 0usize;
    if args.schedule.sinks > args.first_key {
        sinks = args.schedule.sinks - args.first_key;
    }
    sinks
}

/// Returns whether `row`, whose [`visible`] keys and values are the first `end`, sees key and value
/// `at`.
#[cube]
pub(super) fn sees(
    row: usize,
    at: usize,
    end: usize,
    args: &StreamArgs,
    #[comptime] window: bool,
) -> bool {
    let mut seen = at < end;
    if comptime!(window) {
        seen = seen && (at >= begin_of(row, args) || at < sinks(args));
    }
    seen
}

/// The first key from `start` on that `row`, or a row after it, sees.
#[cube]
pub(super) fn skip_hidden(
    start: usize,
    row: usize,
    args: &StreamArgs,
    #[comptime] window: bool,
) -> usize {
    let mut next = start;
    if comptime!(window) {
        let begin = begin_of(row, args);
        if start >= sinks(args) && start < begin {
            next = begin;
        }
    }
    next
}

/// The score of the product of a query and a key.
#[cube]
pub(super) fn score_of(product: f32, args: &StreamArgs, #[comptime] bounded: bool) -> f32 {
    let mut score = product * args.scale;
    if comptime!(bounded) {
        score = softcap(score, args.softcap);
    }
    score
}

/// Dot product of two rows.
#[cube]
pub(super) fn dot<Q: Float>(
    a: &[Q],
    a_start: usize,
    b: &[f32],
    b_start: usize,
    #[comptime] head_dim: usize,
) -> f32 {
    let mut sum = f32::new(0.0);
    for c in 0..head_dim {
        sum += f32::cast_from(a[a_start + c]) * b[b_start + c];
    }
    sum
}

/// State of the rows that the units of a cube share: the scores of a step and then weights, `[ROWS,
/// KEYS]`, and the softmax so far.
#[derive(CubeType)]
struct Rows {
    scores: Shared<[f32]>,
    maxima: Shared<[f32]>,
    sums: Shared<[f32]>,
    rescale: Shared<[f32]>,
}

#[cube]
fn new_rows() -> Rows {
    let unit = UNIT_POS as usize;
    let mut maxima = Shared::<[f32]>::new_slice(ROWS);
    let mut sums = Shared::<[f32]>::new_slice(ROWS);
    if unit < ROWS {
        maxima[unit] = f32::new(LOWEST);
        sums[unit] = f32::new(0.0);
    }
    let scores = Shared::<[f32]>::new_slice(comptime!(ROWS * KEYS));
    Rows { scores, maxima, sums, rescale: Shared::<[f32]>::new_slice(ROWS) }
}

/// Scores of the keys from `start` on.
#[cube]
fn score<Q: Float>(
    inputs: &Inputs<Q, f32>,
    start: usize,
    block: &Block,
    rows: &mut Rows,
    args: &StreamArgs,
    #[comptime] bp: StreamBlueprint,
) {
    let key_dim = comptime!(bp.head_dim.keys);
    let mut i = UNIT_POS as usize;
    while i < comptime!(ROWS * KEYS) {
        let row = block.first_row + i / KEYS;
        let at = start + i % KEYS;
        let mut score = f32::new(LOWEST);
        if row < args.m && sees(row, at, visible(row, args), args, bp.window) {
            let q = (block.head * args.m + row) * key_dim;
            let k = (block.head / args.n_rep * args.n + at) * key_dim;
            let product = if at < quantized_end(row, &args.schedule.keys, args) {
                dot::<Q>(&inputs.query, q, &inputs.key_hat, k, key_dim)
            } else {
                dot::<Q>(&inputs.query, q, &inputs.key, k, key_dim)
            };
            score = score_of(product, args, bp.softcap);
        }
        rows.scores[i] = score;
        i += comptime!(bp.units);
    }
}

/// Turns scores into weights: one unit per row.
#[cube]
fn weigh(rows: &mut Rows) {
    let row = UNIT_POS as usize;
    if row < ROWS {
        let mut maximum = rows.maxima[row];
        for t in 0..KEYS {
            maximum = clamp_min(maximum, rows.scores[row * KEYS + t]);
        }
        let factor = (rows.maxima[row] - maximum).exp();
        let mut sum = rows.sums[row] * factor;
        for t in 0..KEYS {
            let p = weight_of(rows.scores[row * KEYS + t], maximum);
            rows.scores[row * KEYS + t] = p * f32::new(DOWN);
            sum += p;
        }
        rows.maxima[row] = maximum;
        rows.sums[row] = sum;
        rows.rescale[row] = factor;
    }
}

/// Adds the values from `start` on to the unit's channels, `[ROWS, channels]`.
#[cube]
fn add_values<Q: Float>(
    inputs: &Inputs<Q, f32>,
    start: usize,
    block: &Block,
    rows: &Rows,
    acc: &mut Array<f32>,
    args: &StreamArgs,
    #[comptime] bp: StreamBlueprint,
) {
    let head_dim = comptime!(bp.head_dim.values);
    let channels = comptime!(bp.channels(bp.head_dim.values));
    #[unroll]
    for i in 0..channels {
        let channel = UNIT_POS as usize + i * comptime!(bp.units);
        if channel < head_dim {
            #[unroll]
            for r in 0..ROWS {
                let row = block.first_row + r;
                let seen_hat = quantized_end(row, &args.schedule.values, args);
                let end = visible(row, args);
                let mut sum = acc[r * channels + i] * rows.rescale[r];
                for t in 0..KEYS {
                    let at = start + t;
                    // Hidden tokens are left out: their weight is 0, but 0 times infinity is
                    // not 0.
                    if sees(row, at, end, args, bp.window) {
                        let v = (block.head / args.n_rep * args.n + at) * head_dim + channel;
                        let p = rows.scores[r * KEYS + t];
                        if at < seen_hat {
                            sum += p * inputs.value_hat[v];
                        } else {
                            sum += p * inputs.value[v];
                        }
                    }
                }
                acc[r * channels + i] = sum;
            }
        }
    }
}

/// One past the last key that some row of a block of `ROWS` sees.
#[cube]
pub(super) fn last_visible(first_row: usize, args: &StreamArgs) -> usize {
    visible(clamp_max(first_row + ROWS, args.m) - 1, args)
}

/// Forward pass for any head_dim; one cube per (tile of rows, query head).
#[cube(launch, address_type = "dynamic")]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
pub(super) fn forward<Q: Float>(
    inputs: Inputs<Q, f32>,
    output: &mut [Q],
    lse: &mut [f32],
    args: StreamArgs,
    #[comptime] bp: StreamBlueprint,
    #[define(Q)] _query_type: ElemType,
) {
    let head_dim = comptime!(bp.head_dim.values);
    let channels = comptime!(bp.channels(bp.head_dim.values));
    let unit = UNIT_POS as usize;
    let place = cube_at(args.m.div_ceil(ROWS), args.heads, comptime!(bp.flat));
    let block = Block { head: place.y, first_row: place.x * ROWS };
    let (head, first_row) = (block.head, block.first_row);
    if comptime!(bp.flat) {
        if place.z > 0 {
            terminate!();
        }
    }
    let mut rows = new_rows();
    let mut acc = Array::<f32>::new(comptime!(ROWS * bp.channels(bp.head_dim.values)));
    #[unroll]
    for i in 0..comptime!(ROWS * bp.channels(bp.head_dim.values)) {
        acc[i] = f32::new(0.0);
    }
    sync_cube();
    let end = last_visible(first_row, &args);
    let mut start = skip_hidden(0usize, first_row, &args, bp.window);
    while start < end {
        score::<Q>(&inputs, start, &block, &mut rows, &args, bp);
        sync_cube();
        weigh(&mut rows);
        sync_cube();
        add_values::<Q>(&inputs, start, &block, &rows, &mut acc, &args, bp);
        sync_cube();
        start = skip_hidden(start + KEYS, first_row, &args, bp.window);
    }

    #[unroll]
    for r in 0..ROWS {
        let row = first_row + r;
        if row < args.m {
            #[unroll]
            for i in 0..channels {
                let channel = unit + i * comptime!(bp.units);
                if channel < head_dim {
                    let out = acc[r * channels + i] / (rows.sums[r] * f32::new(DOWN));
                    output[(head * args.m + row) * head_dim + channel] = Q::cast_from(out);
                }
            }
            if unit == 0 {
                lse[head * args.m + row] = rows.maxima[r] + rows.sums[r].ln();
            }
        }
    }
}
