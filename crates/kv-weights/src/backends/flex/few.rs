//! Products of few rows of activations with blocks, in vectors.
//!
//! Blocks are unpacked one at a time into bytes. These are multiplied with activations either as
//! 16-bit integers or as floats.

use super::{
    instructions::CodeInstructions,
    integers::{BLOCK, Integers, Rows},
    stacked::Stacked,
    tuning::{AHEAD, LINE, PARALLEL},
};
use crate::{
    Activations,
    formats::unpack::{Blocks, MOST},
};

/// Returns `x W^T` for few rows of `x`, `[rows of x, rows]`.
pub(super) fn project<I: CodeInstructions, F: Blocks>(
    x: &[f32],
    matrix: &Stacked<'_>,
    activations: Activations,
) -> Vec<f32> {
    assert!(I::available());
    let (columns, row) = (matrix.columns(), matrix.layout().row_bytes());
    let n = x.len() / columns;
    let x = match activations.largest() {
        Some(largest) => Rows::Rounded(Integers::round(x, largest)),
        None => Rows::Exact(x),
    };
    matrix.by_weight_rows(n, matrix.rows() * columns * n >= PARALLEL, |blocks, out| {
        let blocks = blocks.chunks_exact(row);
        for (row, out) in blocks.zip(out.chunks_exact_mut(n)) {
            // SAFETY: the processor has the instructions, as asserted.
            unsafe { I::row::<F>(row, &x, columns, out) };
        }
    })
}

/// Multiplies one row of weights with all of `x`.
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
pub(super) unsafe fn row<I: CodeInstructions, F: Blocks>(
    row: &[u8],
    x: &Rows<'_>,
    columns: usize,
    out: &mut [f32],
) {
    // SAFETY: as the caller says.
    unsafe {
        match x {
            Rows::Rounded(x) => rounded::<I, F>(row, x, columns, out),
            Rows::Exact(x) => exact::<I, F>(row, x, columns, out),
        }
    }
}

struct Unpacked {
    codes: [u8; MOST],
    scales: [f32; MOST / 16],
    mins: [f32; MOST / BLOCK],
}

const EMPTY: Unpacked =
    Unpacked { codes: [0; MOST], scales: [0.0; MOST / 16], mins: [0.0; MOST / BLOCK] };

impl Unpacked {
    /// Unpacks block `i` of a row and prefetches a later one.
    ///
    /// # Safety
    /// The processor has the instructions.
    #[inline(always)]
    unsafe fn read<I: CodeInstructions, F: Blocks>(&mut self, row: &[u8], i: usize) {
        let block = &row[i * F::BYTES..][..F::BYTES];
        for line in (0..F::BYTES).step_by(LINE) {
            // SAFETY: as the caller says.
            unsafe { I::fetch(block.as_ptr().wrapping_add(AHEAD + line)) };
        }
        F::unpack::<I>(block, &mut self.codes, &mut self.scales, &mut self.mins);
    }
}

/// Multiplies one row of weights with all of `x`, rounded to integers.
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
unsafe fn rounded<I: CodeInstructions, F: Blocks>(
    row: &[u8],
    x: &Integers,
    columns: usize,
    out: &mut [f32],
) {
    let mut block = EMPTY;
    // SAFETY: as the caller says.
    unsafe {
        if let [out] = out {
            let (mut sums, mut mins) = (I::splat(0.0), 0.0);
            for i in 0..columns / F::NUMBERS {
                block.read::<I, F>(row, i);
                (sums, mins) = rounded_block::<I, F>(&block, x, i * F::NUMBERS, sums, mins);
            }
            *out = I::total(sums) + mins;
            return;
        }
        out.fill(0.0);
        for i in 0..columns / F::NUMBERS {
            block.read::<I, F>(row, i);
            for (n, out) in out.iter_mut().enumerate() {
                let at = n * columns + i * F::NUMBERS;
                let (sums, mins) = rounded_block::<I, F>(&block, x, at, I::splat(0.0), 0.0);
                *out += I::total(sums) + mins;
            }
        }
    }
}

/// Adds the products of a block with the activations from `at` on to `sums` and `mins`.
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
unsafe fn rounded_block<I: CodeInstructions, F: Blocks>(
    block: &Unpacked,
    x: &Integers,
    at: usize,
    mut sums: I::Vector,
    mut mins: f32,
) -> (I::Vector, f32) {
    let codes = &x.codes[at..at + F::NUMBERS];
    let (steps, of_steps) = (&x.steps[at / BLOCK..], &x.sums[at / BLOCK..]);
    for part in 0..F::NUMBERS / BLOCK {
        for first in (part * BLOCK..(part + 1) * BLOCK).step_by(F::SPAN) {
            let span = first..first + F::SPAN;
            let scale = block.scales[first / F::SPAN] * steps[part];
            // SAFETY: as the caller says.
            sums = unsafe {
                let products =
                    I::integer_products(&block.codes[span.clone()], F::ZERO, &codes[span]);
                I::multiply_add(products, I::splat(scale), sums)
            };
        }
        if F::MINS {
            mins += block.mins[part] * of_steps[part];
        }
    }
    (sums, mins)
}

/// Multiplies one row of weights with all of `x`, not rounded.
///
/// Weights are restored, with rounding, before they are multiplied. The alternative, to multiply
/// the sum of activations by the minimum, has an error relative to both parts, which is large where
/// they cancel.
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
unsafe fn exact<I: CodeInstructions, F: Blocks>(
    row: &[u8],
    x: &[f32],
    columns: usize,
    out: &mut [f32],
) {
    let mut block = EMPTY;
    out.fill(0.0);
    for i in 0..columns / F::NUMBERS {
        // SAFETY: as the caller says.
        unsafe { block.read::<I, F>(row, i) };
        for (n, out) in out.iter_mut().enumerate() {
            let at = n * columns + i * F::NUMBERS;
            let codes = block.codes[..F::NUMBERS].chunks_exact(F::SPAN);
            let spans = codes.zip(x[at..at + F::NUMBERS].chunks_exact(F::SPAN));
            // SAFETY: as the caller says.
            unsafe {
                let mut sums = I::splat(0.0);
                for (span, (codes, x)) in spans.enumerate() {
                    let min = if F::MINS { block.mins[span * F::SPAN / BLOCK] } else { 0.0 };
                    let scale = [block.scales[span], min].map(|number| I::splat(number));
                    sums = I::float_products(codes, F::ZERO, scale, x, sums);
                }
                *out += I::total(sums);
            }
        }
    }
}
