use cubecl::prelude::*;

use super::base::DecodeBlueprint;
use crate::kernels::codec::{code_at, min_of, scale_of};

/// Below every score; WGSL has no infinity literal.
pub(crate) const LOWEST: f32 = -1.0e30;

/// Run-time numbers of a launch.
#[derive(CubeType, CubeLaunch)]
pub(super) struct DecodeArgs {
    pub(super) rows: usize,
    pub(super) tokens: usize,
    pub(super) sinks: usize,
    /// Tokens after the sinks whose keys are packed.
    pub(super) packed_keys: usize,
    /// Tokens after the sinks whose values are packed.
    pub(super) packed_values: usize,
    pub(super) key_ring: usize,
    pub(super) value_ring: usize,
    /// Float rows of the keys.
    pub(super) key_rows: usize,
    /// Float rows of one slice.
    pub(super) float_rows: usize,
    pub(super) key_slice_words: usize,
    pub(super) value_slice_words: usize,
    pub(super) sink_tiles: usize,
    pub(super) n_tiles: usize,
    pub(super) n_splits: usize,
    pub(super) tiles_per_split: usize,
    pub(super) scale: f32,
}

/// First element of the float row of `token` in a ring that starts after the sinks.
#[cube]
fn float_row(token: usize, ring: usize, args: &DecodeArgs) -> usize {
    let mut row = token;
    if token >= args.sinks {
        row = args.sinks + (token - args.sinks) % ring;
    }
    row
}

/// One cube per (slice, split, chunk of query rows); writes `(o, m, l)` of each row to
/// `partials` `[slices, rows, n_splits, head_dim + 2]`.
#[cube(launch)]
pub(super) fn partial_attention<R: Float>(
    query: &[f32],
    keys: &[u32],
    values: &[u32],
    floats: &[R],
    partials: &mut [f32],
    args: DecodeArgs,
    #[comptime] bp: DecodeBlueprint,
    #[define(R)] _dtype: ElemType,
) {
    let head_dim = comptime!(bp.head_dim);
    let rows = comptime!(bp.rows);
    let tile = comptime!(bp.tile);
    let units = comptime!(bp.units);
    let group_size = comptime!(bp.group_size);
    let value_groups = comptime!(bp.value_groups());
    let channels = comptime!(bp.head_dim.div_ceil(bp.units));

    let unit = UNIT_POS as usize;
    let slice = CUBE_POS_X as usize;
    let split = CUBE_POS_Y as usize;
    let first_row = CUBE_POS_Z as usize * rows;

    let mut scaled = Shared::<[f32]>::new_slice(rows * head_dim);
    let mut folded = Shared::<[f32]>::new_slice(rows * head_dim);
    let mut offset = Shared::<[f32]>::new_slice(rows);
    let mut scores = Shared::<[f32]>::new_slice(rows * tile);
    let mut maxima = Shared::<[f32]>::new_slice(rows);
    let mut sums = Shared::<[f32]>::new_slice(rows);
    let mut rescale = Shared::<[f32]>::new_slice(rows);
    let value_params = comptime!((bp.tile * bp.value_groups()).max(1));
    let mut value_scale = Shared::<[f32]>::new_slice(value_params);
    let mut value_min = Shared::<[f32]>::new_slice(value_params);
    let mut acc = Array::<f32>::new(comptime!(bp.rows * bp.head_dim.div_ceil(bp.units)));

    let mut i = unit;
    while i < rows * head_dim {
        let row = first_row + i / head_dim;
        let mut q = f32::new(0.0);
        if row < args.rows {
            q = query[(slice * args.rows + row) * head_dim + i % head_dim] * args.scale;
        }
        scaled[i] = q;
        i += units;
    }
    if unit < rows {
        maxima[unit] = f32::new(LOWEST);
        sums[unit] = f32::new(0.0);
    }
    #[unroll]
    for i in 0..comptime!(bp.rows * bp.head_dim.div_ceil(bp.units)) {
        acc[i] = f32::new(0.0);
    }
    sync_cube();

    let float_base = slice * args.float_rows;
    let key_base = slice * args.key_slice_words;
    let value_base = slice * args.value_slice_words;
    let mut tile_end = (split + 1) * args.tiles_per_split;
    if tile_end > args.n_tiles {
        tile_end = args.n_tiles;
    }
    for index in split * args.tiles_per_split..tile_end {
        // Tiles of sinks, then tiles of one group of tokens each.
        let mut start = index * tile;
        let mut end = args.sinks;
        if index >= args.sink_tiles {
            start = args.sinks + (index - args.sink_tiles) * tile;
            end = args.tokens;
        }
        if end > args.tokens {
            end = args.tokens;
        }
        let mut count = end - start;
        if count > tile {
            count = tile;
        }
        let windowed = index >= args.sink_tiles;

        // Fold the group's parameters into the query.
        let mut packed = false;
        let mut group_base = 0usize;
        if comptime!(bp.key_bits > 0) {
            let code_rows = comptime!(bp.group_size / (32 / bp.key_bits.max(1) as usize));
            packed = windowed && start - args.sinks < args.packed_keys;
            if packed {
                let group = (start - args.sinks) / group_size;
                group_base = key_base + group * (code_rows + 1) * head_dim;
                let mut i = unit;
                while i < head_dim {
                    let params = keys[group_base + code_rows * head_dim + i];
                    let scale = scale_of(params);
                    for r in 0..rows {
                        folded[r * head_dim + i] = scaled[r * head_dim + i] * scale;
                    }
                    i += units;
                }
                if unit < rows {
                    let mut sum = f32::new(0.0);
                    for c in 0..head_dim {
                        let params = keys[group_base + code_rows * head_dim + c];
                        sum += scaled[unit * head_dim + c] * min_of(params);
                    }
                    offset[unit] = sum;
                }
            }
        }
        if comptime!(bp.value_bits > 0) {
            let n_words = comptime!(bp.head_dim / (32 / bp.value_bits.max(1) as usize));
            let mut i = unit;
            while i < tile * value_groups {
                let token = start + i / value_groups;
                if i / value_groups < count && windowed && token - args.sinks < args.packed_values {
                    let line = value_base + (token - args.sinks) * (n_words + value_groups);
                    let params = values[line + n_words + i % value_groups];
                    value_scale[i] = scale_of(params);
                    value_min[i] = min_of(params);
                }
                i += units;
            }
        }
        sync_cube();

        // Scores of every (row, token) of the tile.
        let mut i = unit;
        while i < rows * tile {
            let r = i / tile;
            let t = i % tile;
            let mut score = f32::new(LOWEST);
            if t < count {
                score = f32::new(0.0);
                if packed {
                    if comptime!(bp.key_bits > 0) {
                        let codes = comptime!(32 / bp.key_bits.max(1) as usize);
                        let line = group_base + t / codes * head_dim;
                        for c in 0..head_dim {
                            let code = code_at(keys[line + c], t % codes, bp.key_bits);
                            score += folded[r * head_dim + c] * code;
                        }
                        score += offset[r];
                    }
                } else {
                    let row = float_base + float_row(start + t, args.key_ring, &args);
                    for c in 0..head_dim {
                        let k = f32::cast_from(floats[row * head_dim + c]);
                        score += scaled[r * head_dim + c] * k;
                    }
                }
            }
            scores[i] = score;
            i += units;
        }
        sync_cube();

        if unit < rows {
            let mut maximum = maxima[unit];
            for t in 0..count {
                maximum = clamp_min(maximum, scores[unit * tile + t]);
            }
            let factor = (maxima[unit] - maximum).exp();
            let mut sum = sums[unit] * factor;
            for t in 0..count {
                let p = (scores[unit * tile + t] - maximum).exp();
                scores[unit * tile + t] = p;
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
                for r in 0..rows {
                    acc[r * channels + i] *= rescale[r];
                }
                for t in 0..count {
                    let token = start + t;
                    let mut value = f32::new(0.0);
                    let mut in_float = true;
                    if comptime!(bp.value_bits > 0) {
                        let codes = comptime!(32 / bp.value_bits.max(1) as usize);
                        let n_words = comptime!(bp.head_dim / (32 / bp.value_bits.max(1) as usize));
                        if windowed && token - args.sinks < args.packed_values {
                            in_float = false;
                            let line = value_base + (token - args.sinks) * (n_words + value_groups);
                            let word = values[line + channel / codes];
                            let code = code_at(word, channel % codes, bp.value_bits);
                            let at = t * value_groups + channel / group_size;
                            value = code * value_scale[at] + value_min[at];
                        }
                    }
                    if in_float {
                        let row =
                            float_base + args.key_rows + float_row(token, args.value_ring, &args);
                        value = f32::cast_from(floats[row * head_dim + channel]);
                    }
                    #[unroll]
                    for r in 0..rows {
                        acc[r * channels + i] += scores[r * tile + t] * value;
                    }
                }
            }
        }
        sync_cube();
    }

    #[unroll]
    for r in 0..rows {
        let row = first_row + r;
        if row < args.rows {
            let base = ((slice * args.rows + row) * args.n_splits + split) * (head_dim + 2);
            #[unroll]
            for i in 0..channels {
                let channel = unit + i * units;
                if channel < head_dim {
                    partials[base + channel] = acc[r * channels + i];
                }
            }
            if unit == 0 {
                partials[base + head_dim] = maxima[r];
                partials[base + head_dim + 1] = sums[r];
            }
        }
    }
}

/// Merges the splits of each row; one unit per (row, channel).
#[cube(launch)]
pub(super) fn merge_partials(
    partials: &[f32],
    output: &mut [f32],
    lse: &mut [f32],
    n: usize,
    n_splits: usize,
    head_dim: usize,
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
        output[ABSOLUTE_POS] = out / sum;
        if channel == 0 {
            lse[row] = maximum + sum.ln();
        }
    }
}
