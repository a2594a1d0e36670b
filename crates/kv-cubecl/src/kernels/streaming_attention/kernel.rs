use cubecl::prelude::*;

use crate::{
    kernels::{
        decode_attention::{LOWEST, weight_of},
        grid::cube_at,
        layout::{ScheduleArgs, SideScheduleArgs, quantized},
    },
    layout::Sides,
};

/// Query rows per cube.
pub(super) const ROWS: usize = 8;
/// Keys per step.
pub(super) const KEYS: usize = 32;

/// What changes the generated code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct StreamBlueprint {
    /// Channels of queries and keys, and of values.
    pub(super) head_dim: Sides<usize>,
    pub(super) units: usize,
    /// See [`Grid::flat`](crate::kernels::Grid::flat).
    pub(super) flat: bool,
}

impl StreamBlueprint {
    /// Channels of a row of `head_dim` that a unit works on.
    pub(super) fn channels(&self, head_dim: usize) -> usize {
        head_dim.div_ceil(self.units)
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
}

/// Number of keys or values, from the first, that `row` sees quantized: `key_hat_end` or `value_hat_end` of
/// its [`RowView`](crate::layout::RowView).
#[cube]
pub(super) fn hat_end(row: usize, side: &SideScheduleArgs, args: &StreamArgs) -> usize {
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

/// Dot product of two rows.
#[cube]
pub(super) fn dot(
    a: &[f32],
    a_start: usize,
    b: &[f32],
    b_start: usize,
    #[comptime] head_dim: usize,
) -> f32 {
    let mut sum = f32::new(0.0);
    for c in 0..head_dim {
        sum += a[a_start + c] * b[b_start + c];
    }
    sum
}

/// Forward pass for any head_dim; one cube per (tile of rows, query head).
#[cube(launch, address_type = "dynamic")]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
pub(super) fn forward(
    query: &[f32],
    key: &[f32],
    key_hat: &[f32],
    value: &[f32],
    value_hat: &[f32],
    output: &mut [f32],
    lse: &mut [f32],
    args: StreamArgs,
    #[comptime] bp: StreamBlueprint,
) {
    let key_dim = comptime!(bp.head_dim.keys);
    let head_dim = comptime!(bp.head_dim.values);
    let units = comptime!(bp.units);
    let channels = comptime!(bp.channels(bp.head_dim.values));
    let unit = UNIT_POS as usize;
    let place = cube_at(args.m.div_ceil(ROWS), args.heads, comptime!(bp.flat));
    let head = place.y;
    let first_row = place.x * ROWS;
    if comptime!(bp.flat) {
        if place.z > 0 {
            terminate!();
        }
    }
    let key_base = head / args.n_rep * args.n;

    let mut scores = Shared::<[f32]>::new_slice(comptime!(ROWS * KEYS));
    let mut maxima = Shared::<[f32]>::new_slice(ROWS);
    let mut sums = Shared::<[f32]>::new_slice(ROWS);
    let mut rescale = Shared::<[f32]>::new_slice(ROWS);
    let mut acc = Array::<f32>::new(comptime!(ROWS * bp.channels(bp.head_dim.values)));
    if unit < ROWS {
        maxima[unit] = f32::new(LOWEST);
        sums[unit] = f32::new(0.0);
    }
    #[unroll]
    for i in 0..comptime!(ROWS * bp.channels(bp.head_dim.values)) {
        acc[i] = f32::new(0.0);
    }
    sync_cube();

    let mut last_row = first_row + ROWS - 1;
    if last_row >= args.m {
        last_row = args.m - 1;
    }
    let end = visible(last_row, &args);
    let mut start = 0usize;
    while start < end {
        let mut i = unit;
        while i < comptime!(ROWS * KEYS) {
            let row = first_row + i / KEYS;
            let at = start + i % KEYS;
            let mut score = f32::new(LOWEST);
            if row < args.m && at < visible(row, &args) {
                let q = (head * args.m + row) * key_dim;
                let k = (key_base + at) * key_dim;
                if at < hat_end(row, &args.schedule.keys, &args) {
                    score = dot(query, q, key_hat, k, key_dim) * args.scale;
                } else {
                    score = dot(query, q, key, k, key_dim) * args.scale;
                }
            }
            scores[i] = score;
            i += units;
        }
        sync_cube();
        if unit < ROWS {
            let mut maximum = maxima[unit];
            for t in 0..KEYS {
                maximum = clamp_min(maximum, scores[unit * KEYS + t]);
            }
            let factor = (maxima[unit] - maximum).exp();
            let mut sum = sums[unit] * factor;
            for t in 0..KEYS {
                let score = scores[unit * KEYS + t];
                let p = weight_of(score, maximum);
                scores[unit * KEYS + t] = p;
                sum += p;
            }
            maxima[unit] = maximum;
            sums[unit] = sum;
            rescale[unit] = factor;
        }
        sync_cube();
        #[unroll]
        for i in 0..channels {
            let channel = unit + i * units;
            if channel < head_dim {
                #[unroll]
                for r in 0..ROWS {
                    let seen_hat = hat_end(first_row + r, &args.schedule.values, &args);
                    let seen = visible(first_row + r, &args);
                    let mut sum = acc[r * channels + i] * rescale[r];
                    for t in 0..KEYS {
                        let at = start + t;
                        // Hidden tokens are left out: their weight is 0, but 0 times infinity is
                        // not 0.
                        if at < seen {
                            let v = (key_base + at) * head_dim + channel;
                            let p = scores[r * KEYS + t];
                            if at < seen_hat {
                                sum += p * value_hat[v];
                            } else {
                                sum += p * value[v];
                            }
                        }
                    }
                    acc[r * channels + i] = sum;
                }
            }
        }
        sync_cube();
        start += KEYS;
    }

    #[unroll]
    for r in 0..ROWS {
        let row = first_row + r;
        if row < args.m {
            #[unroll]
            for i in 0..channels {
                let channel = unit + i * units;
                if channel < head_dim {
                    let out = acc[r * channels + i] / sums[r];
                    output[(head * args.m + row) * head_dim + channel] = out;
                }
            }
            if unit == 0 {
                lse[head * args.m + row] = maxima[r] + sums[r].ln();
            }
        }
    }
}
