//! Kernels for any processor: blocks are unpacked one at a time into bytes or floats, and plain loops multiply them,
//! which the compiler vectorizes.

use macerator::Simd;

use super::threads::in_parts;
use crate::{
    Activations, PackedLayout, WeightFormat,
    formats::flex::{self, Blocks, MOST, with_blocks},
};

/// Rows of weights that a thread takes at a time.
const PART: usize = 64;
/// Multiplications that are worth a second thread.
const PARALLEL: usize = 1 << 17;
/// Numbers that are rounded to bytes together.
const BLOCK: usize = 32;

/// `x W^T` for few rows of `x`, `[rows of x, rows]`.
pub(super) fn project<F: Blocks>(
    x: &[f32],
    blocks: &[u8],
    layout: &PackedLayout,
    activations: Activations,
) -> Vec<f32> {
    let ([rows, columns], row) = (layout.shape(), layout.row_bytes());
    let n = x.len() / columns;
    let rounded_x = activations.largest().map(|largest| Integers::round(x, largest));
    let mut by_weight = vec![0.0; rows * n];
    let parts = blocks.chunks(PART * row).zip(by_weight.chunks_mut(PART * n));
    in_parts(parts, rows * columns * n >= PARALLEL, |(blocks, out)| {
        for (blocks, out) in blocks.chunks_exact(row).zip(out.chunks_exact_mut(n)) {
            match &rounded_x {
                None => exact(F::default(), blocks, x, columns, out),
                Some(x) => rounded(F::default(), blocks, x, columns, out),
            }
        }
    });
    transposed(by_weight, n)
}

/// Rows of `n` as columns.
pub(super) fn transposed(by_weight: Vec<f32>, n: usize) -> Vec<f32> {
    if n == 1 {
        return by_weight;
    }
    let mut out = Vec::with_capacity(by_weight.len());
    for row in 0..n {
        out.extend(by_weight[row..].iter().step_by(n));
    }
    out
}

/// The numbers of whole blocks.
pub(super) fn restore(blocks: &[u8], format: WeightFormat, out: &mut [f32]) {
    with_blocks!(format, F => restore_blocks::<F>(blocks, out));
}

fn restore_blocks<F: Blocks>(blocks: &[u8], out: &mut [f32]) {
    vectorized(F::default(), blocks, out);

    #[macerator::with_simd]
    fn vectorized<S: Simd, F: Blocks>(_: F, blocks: &[u8], out: &mut [f32]) {
        flex::restore::<F>(blocks, out);
    }
}

/// Activations as integers.
struct Integers {
    codes: Vec<i16>,
    /// What 1 stands for, of each block.
    steps: Vec<f32>,
    /// Sums of the rounded numbers of each block.
    sums: Vec<f32>,
}

impl Integers {
    fn round(x: &[f32], largest: f32) -> Self {
        let blocks = x.len() / BLOCK;
        let mut codes = Vec::with_capacity(x.len());
        let (mut steps, mut sums) = (Vec::with_capacity(blocks), Vec::with_capacity(blocks));
        for x in x.chunks_exact(BLOCK) {
            let (step, per_step) = step(x, largest);
            let start = codes.len();
            // A NaN is the code 0 and has a step that is NaN.
            codes.extend(x.iter().map(|x| (x * per_step).round_ties_even() as i16));
            let sum: i32 = codes[start..].iter().map(|&code| i32::from(code)).sum();
            steps.push(step);
            sums.push(sum as f32 * step);
        }
        Self { codes, steps, sums }
    }
}

/// What 1 stands for if the largest number becomes the integer `to`, and how many of it are 1. NaN if a number is not
/// finite.
fn step(x: &[f32], to: f32) -> (f32, f32) {
    let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let finite = x.iter().fold(true, |finite, x| finite & x.is_finite());
    let step = if finite { largest / to } else { f32::NAN };
    (step, if step > 0.0 { 1.0 / step } else { 0.0 })
}

/// The products of a row of weights with all of `x`.
#[macerator::with_simd]
fn exact<S: Simd, F: Blocks>(_: F, blocks: &[u8], x: &[f32], columns: usize, out: &mut [f32]) {
    let mut weights = [0.0; MOST];
    let weights = &mut weights[..F::NUMBERS];
    out.fill(0.0);
    for (i, block) in blocks.chunks_exact(F::BYTES).enumerate() {
        flex::restore::<F>(block, weights);
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

/// The products of a row of weights with all of `x` as integers.
#[macerator::with_simd]
fn rounded<S: Simd, F: Blocks>(_: F, blocks: &[u8], x: &Integers, columns: usize, out: &mut [f32]) {
    let (mut codes, mut scales, mut mins) = ([0; MOST], [0.0; MOST / 16], [0.0; MOST / BLOCK]);
    out.fill(0.0);
    for (i, block) in blocks.chunks_exact(F::BYTES).enumerate() {
        F::unpack(block, &mut codes, &mut scales, &mut mins);
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

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use super::*;
    use crate::reference;

    /// The blocks of the tests' fixtures in another order in each row. Processors with instructions for bytes do not
    /// take this way otherwise.
    #[test]
    fn products_are_those_of_the_definition() {
        for &format in WeightFormat::ALL.iter().filter(|format| format.ggml_type().is_some()) {
            let name = format!("{format}.blocks");
            let path: PathBuf =
                [env!("CARGO_MANIFEST_DIR"), "tests/packed/fixtures", &name].iter().collect();
            let fixture = fs::read(path).unwrap();
            let blocks: Vec<_> = fixture.chunks(format.block_bytes()).collect();
            let (rows, columns) = (69, blocks.len() * format.block_numbers());
            let matrix: Vec<u8> = (0..rows)
                .flat_map(|row| (0..blocks.len()).map(move |i| i * 5 + row))
                .flat_map(|i| blocks[i % blocks.len()].iter().copied())
                .collect();
            let layout = PackedLayout::new(format, [rows, columns]).unwrap();
            let n = 3;
            let x: Vec<f32> =
                (0..n * columns).map(|i| ((i * 7919) % 1009) as f32 / 500.0 - 1.0).collect();
            let restored = reference::restore(format, &matrix);
            let magnitudes = |x: &[f32]| x.iter().map(|x| x.abs()).collect::<Vec<_>>();
            let sums = reference::project(&magnitudes(&x), &magnitudes(&restored), columns);
            for activations in [Activations::Exact, Activations::Int16, Activations::Bytes] {
                let rounded =
                    activations.largest().map(|to| reference::round_activations(&x, to).0);
                let x_seen = rounded.as_ref().unwrap_or(&x);
                let products = with_blocks!(format, F => {
                    project::<F>(&x, &matrix, &layout, activations)
                });
                let expected = reference::project(x_seen, &restored, columns);
                for (i, product) in products.into_iter().enumerate() {
                    let error = (f64::from(product) - expected[i]).abs();
                    assert!(error <= 2e-6 * sums[i], "{format} {activations:?}: {i}");
                }
            }
        }
    }
}
