//! Normalizes the variances of a tile.

use cubecl::prelude::*;

use super::elements::{BlockBlueprint, TILE_UNITS};
use crate::formats::{DEVIATIONS, SCALES, cube::is_nan};

/// Scales of tokens or channels during the iterations, in memory that the units of a cube share.
#[derive(CubeType)]
struct Axis {
    scales: Shared<[f32]>,
    /// `1 / scale`.
    inverse: Shared<[f32]>,
    /// Standard deviations of the tile divided by the scales.
    deviations: Shared<[f32]>,
    /// The scales with the least imbalance so far.
    best: Shared<[f32]>,
}

#[cube]
fn new_axis(#[comptime] len: usize) -> Axis {
    let mut axis = Axis {
        scales: Shared::<[f32]>::new_slice(len),
        inverse: Shared::<[f32]>::new_slice(len),
        deviations: Shared::<[f32]>::new_slice(len),
        best: Shared::<[f32]>::new_slice(len),
    };
    let mut i = UNIT_POS as usize;
    while i < len {
        axis.scales[i] = f32::new(1.0);
        axis.inverse[i] = f32::new(1.0);
        axis.best[i] = f32::new(1.0);
        i += TILE_UNITS;
    }
    axis
}

#[cube]
fn clamped(deviation: f32) -> f32 {
    clamp(deviation, f32::new(DEVIATIONS.0), f32::new(DEVIATIONS.1))
}

/// Computes the standard deviations of the rows of a tile, whose `rows` are `row_stride` apart and
/// have `len` numbers that are `stride` apart.
#[cube]
#[allow(clippy::too_many_arguments, reason = "a strided view")]
fn measure(
    numbers: &[f32],
    base: usize,
    rows: &mut Axis,
    columns: &Axis,
    #[comptime] n_rows: usize,
    row_stride: usize,
    #[comptime] len: usize,
    stride: usize,
) {
    let mut row = UNIT_POS as usize;
    while row < n_rows {
        let first = base + row * row_stride;
        let mut sum = f32::new(0.0);
        for i in 0..len {
            sum += numbers[first + i * stride] * columns.inverse[i];
        }
        let mean = sum / f32::new(comptime!(len as f32));
        let mut squares = f32::new(0.0);
        for i in 0..len {
            let x = numbers[first + i * stride] * columns.inverse[i] - mean;
            squares += x * x;
        }
        let variance = squares / f32::new(comptime!((len as f32 - 1.0).max(1.0)));
        rows.deviations[row] = variance.sqrt() * rows.inverse[row];
        row += TILE_UNITS;
    }
}

/// Multiplies the scales by the deviations.
#[cube]
fn update(axis: &mut Axis, #[comptime] len: usize) {
    let mut i = UNIT_POS as usize;
    while i < len {
        let wanted = axis.scales[i] * clamped(axis.deviations[i]);
        let scale = clamp(wanted, f32::new(SCALES.0), f32::new(SCALES.1));
        let inverse = f32::new(1.0) / scale;
        axis.deviations[i] *= axis.scales[i] * inverse;
        axis.scales[i] = scale;
        axis.inverse[i] = inverse;
        i += TILE_UNITS;
    }
}

/// Returns the quotient of the greatest and the least deviation.
#[cube]
fn spread(axis: &Axis, #[comptime] len: usize) -> f32 {
    let mut least = f32::new(DEVIATIONS.1);
    let mut greatest = f32::new(DEVIATIONS.0);
    for i in 0..len {
        let deviation = clamped(axis.deviations[i]);
        least = clamp_max(least, deviation);
        greatest = clamp_min(greatest, deviation);
    }
    greatest / least
}

/// Keeps the current scales.
#[cube]
fn keep(axis: &mut Axis, #[comptime] len: usize) {
    let mut i = UNIT_POS as usize;
    while i < len {
        axis.best[i] = axis.scales[i];
        i += TILE_UNITS;
    }
}

/// Divides the tile from `base` on by its root mean square and its scales, and writes the scales
/// from `place` on: of tokens, then of channels times the root mean square.
#[cube]
pub(super) fn normalize(
    numbers: &mut [f32],
    base: usize,
    scales: &mut [f32],
    place: usize,
    #[comptime] bp: BlockBlueprint,
) {
    let unit = UNIT_POS as usize;
    let n_tokens = comptime!(bp.spec.block_tokens());
    let head_dim = comptime!(bp.head_dim);
    let mut sums = Shared::<[f32]>::new_slice(TILE_UNITS);
    let mut sum = f32::new(0.0);
    let mut i = unit;
    while i < comptime!(bp.numbers()) {
        // A NaN counts as 0.
        let x = numbers[base + i];
        let x = select(is_nan(x), f32::new(0.0), x);
        numbers[base + i] = x;
        sum += x * x;
        i += TILE_UNITS;
    }
    sums[unit] = sum;
    sync_cube();
    let mut total = f32::new(0.0);
    for other in 0..TILE_UNITS {
        total += sums[other];
    }
    let mut rms = (total / f32::new(comptime!(bp.numbers() as f32))).sqrt();
    if total == 0.0f32 {
        rms = f32::new(1.0);
    }
    let mut i = unit;
    while i < comptime!(bp.numbers()) {
        numbers[base + i] /= rms;
        i += TILE_UNITS;
    }
    let mut tokens = new_axis(n_tokens);
    let mut channels = new_axis(head_dim);
    sync_storage();
    sync_cube();
    measure(&*numbers, base, &mut tokens, &channels, n_tokens, head_dim, head_dim, 1usize);
    measure(&*numbers, base, &mut channels, &tokens, head_dim, 1usize, n_tokens, head_dim);
    sync_cube();
    let mut least = spread(&tokens, n_tokens) + spread(&channels, head_dim);
    for _ in 0..comptime!(bp.spec.tile.map_or(0, |tile| tile.iterations)) {
        sync_cube();
        update(&mut tokens, n_tokens);
        sync_cube();
        measure(&*numbers, base, &mut channels, &tokens, head_dim, 1usize, n_tokens, head_dim);
        update(&mut channels, head_dim);
        sync_cube();
        measure(&*numbers, base, &mut tokens, &channels, n_tokens, head_dim, head_dim, 1usize);
        sync_cube();
        let imbalance = spread(&tokens, n_tokens) + spread(&channels, head_dim);
        // Later scales win ties.
        if imbalance <= least {
            least = imbalance;
            keep(&mut tokens, n_tokens);
            keep(&mut channels, head_dim);
        }
    }
    sync_cube();
    let mut i = unit;
    while i < comptime!(bp.numbers()) {
        let scale = tokens.best[i / head_dim] * channels.best[i % head_dim];
        numbers[base + i] /= scale;
        i += TILE_UNITS;
    }
    let mut i = unit;
    while i < n_tokens {
        scales[place + i] = tokens.best[i];
        i += TILE_UNITS;
    }
    let mut i = unit;
    while i < head_dim {
        scales[place + n_tokens + i] = channels.best[i] * rms;
        i += TILE_UNITS;
    }
}
