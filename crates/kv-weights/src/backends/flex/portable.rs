//! Kernels for any processor: blocks are unpacked into bytes or floats, and plain loops, which the
//! compiler vectorizes, multiply them.

use macerator::Simd;

use super::{
    integers::{BLOCK, Integers},
    stacked::Stacked,
    tuning::PARALLEL,
};
use crate::{
    Activations, WeightFormat,
    formats::unpack::{self, AnyHalves, Blocks, MOST},
};

/// Returns `x W^T` for few rows of `x`, `[rows of x, rows]`.
pub(super) fn project<F: Blocks>(
    x: &[f32],
    matrix: &Stacked<'_>,
    activations: Activations,
) -> Vec<f32> {
    let (columns, row) = (matrix.columns(), matrix.layout().row_bytes());
    let n = x.len() / columns;
    let integers = activations.largest().map(|largest| Integers::round(x, largest));
    matrix.by_weight_rows(n, matrix.rows() * columns * n >= PARALLEL, |blocks, out| {
        let blocks = blocks.chunks_exact(row);
        for (blocks, out) in blocks.zip(out.chunks_exact_mut(n)) {
            match &integers {
                None => exact(F::default(), blocks, x, columns, out),
                Some(x) => rounded(F::default(), blocks, x, columns, out),
            }
        }
    })
}

/// Restores whole blocks with the widest vectors of the processor.
pub(super) fn restore(format: WeightFormat, blocks: &[u8], out: &mut [f32]) {
    vectorized(format, blocks, out);

    #[macerator::with_simd]
    fn vectorized<S: Simd>(format: WeightFormat, blocks: &[u8], out: &mut [f32]) {
        unpack::restore(format, blocks, out);
    }
}

#[macerator::with_simd]
fn exact<S: Simd, F: Blocks>(_: F, blocks: &[u8], x: &[f32], columns: usize, out: &mut [f32]) {
    let mut weights = [0.0; MOST];
    let weights = &mut weights[..F::NUMBERS];
    out.fill(0.0);
    for (i, block) in blocks.chunks_exact(F::BYTES).enumerate() {
        unpack::restore_blocks::<F>(block, weights);
        for (x, out) in x.chunks_exact(columns).zip(&mut *out) {
            *out += dot(weights, &x[i * F::NUMBERS..][..F::NUMBERS]);
        }
    }
}

#[inline(always)]
fn dot(weights: &[f32], x: &[f32]) -> f32 {
    let mut sums = [0.0; 16];
    for (weights, x) in weights.chunks_exact(16).zip(x.chunks_exact(16)) {
        for i in 0..16 {
            sums[i] += weights[i] * x[i];
        }
    }
    sums.iter().sum()
}

#[macerator::with_simd]
fn rounded<S: Simd, F: Blocks>(_: F, blocks: &[u8], x: &Integers, columns: usize, out: &mut [f32]) {
    let (mut codes, mut scales, mut mins) = ([0; MOST], [0.0; MOST / 16], [0.0; MOST / BLOCK]);
    out.fill(0.0);
    for (i, block) in blocks.chunks_exact(F::BYTES).enumerate() {
        F::unpack::<AnyHalves>(block, &mut codes, &mut scales, &mut mins);
        for (row, out) in out.iter_mut().enumerate() {
            let start = row * columns + i * F::NUMBERS;
            let x_codes = &x.codes[start..][..F::NUMBERS];
            for (span, x_codes) in x_codes.chunks_exact(F::SPAN).enumerate() {
                let codes = &codes[span * F::SPAN..][..F::SPAN];
                let step = x.steps[start / BLOCK + span * F::SPAN / BLOCK];
                *out += dot_integers::<F>(codes, x_codes) as f32 * (scales[span] * step);
            }
            if F::MINS {
                for (min, sum) in mins.iter().zip(&x.sums[start / BLOCK..][..F::NUMBERS / BLOCK]) {
                    *out += min * sum;
                }
            }
        }
    }
}

#[inline(always)]
fn dot_integers<F: Blocks>(codes: &[u8], x: &[i16]) -> i32 {
    let products = codes.iter().zip(x).map(|(&code, &x)| {
        let code = i32::from(code) - i32::from(F::ZERO);
        code * i32::from(x)
    });
    products.sum()
}
