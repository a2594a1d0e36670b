//! Products for processors with AVX2, FMA and F16C: blocks are unpacked one at a time into bytes, which are multiplied with
//! activations as integers of 16 bits, or as floats.

use core::arch::x86_64::*;

use super::{
    AHEAD, LINE, PARALLEL, by_weight_rows,
    integers::{BLOCK, Integers},
};
use crate::{
    Activations, PackedLayout,
    formats::flex::{Blocks, Halves, MOST},
};

/// Whether this processor has the instructions.
pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// Numbers of 16 bits, where the processor is known to widen them.
struct F16c;

impl Halves for F16c {
    #[inline(always)]
    fn widened(bits: u16) -> f32 {
        // SAFETY: only functions for processors that have it unpack with it.
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))) }
    }
}

/// `x W^T` for few rows of `x`, `[rows of x, rows]`.
pub(super) fn project<F: Blocks>(
    x: &[f32],
    blocks: &[u8],
    layout: &PackedLayout,
    activations: Activations,
) -> Vec<f32> {
    assert!(available());
    let ([rows, columns], row) = (layout.shape(), layout.row_bytes());
    let n = x.len() / columns;
    let parallel = rows * columns * n >= PARALLEL;
    match activations.largest() {
        Some(largest) => {
            let x = Integers::round(x, largest);
            by_weight_rows(layout, n, parallel, |first, out| {
                let blocks = blocks[first * row..].chunks_exact(row);
                for (blocks, out) in blocks.zip(out.chunks_exact_mut(n)) {
                    // SAFETY: the processor has the instructions, as asserted.
                    unsafe { rounded::<F>(blocks, &x, columns, out) };
                }
            })
        }
        None => {
            let sums: Vec<f32> = x.as_chunks::<BLOCK>().0.iter().map(|x| x.iter().sum()).collect();
            by_weight_rows(layout, n, parallel, |first, out| {
                let blocks = blocks[first * row..].chunks_exact(row);
                for (blocks, out) in blocks.zip(out.chunks_exact_mut(n)) {
                    // SAFETY: the processor has the instructions, as asserted.
                    unsafe { exact::<F>(blocks, x, &sums, columns, out) };
                }
            })
        }
    }
}

/// A block as bytes.
struct Unpacked {
    codes: [u8; MOST],
    scales: [f32; MOST / 16],
    mins: [f32; MOST / BLOCK],
}

const EMPTY: Unpacked =
    Unpacked { codes: [0; MOST], scales: [0.0; MOST / 16], mins: [0.0; MOST / BLOCK] };

impl Unpacked {
    /// Unpacks block `i` of a row, and has the processor fetch what comes later.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn read<F: Blocks>(&mut self, row: &[u8], i: usize) {
        let block = &row[i * F::BYTES..][..F::BYTES];
        for line in (0..F::BYTES).step_by(LINE) {
            _mm_prefetch::<_MM_HINT_T0>(block.as_ptr().wrapping_add(AHEAD + line).cast());
        }
        F::unpack::<F16c>(block, &mut self.codes, &mut self.scales, &mut self.mins);
    }

    /// 16 codes, less that of 0.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn sixteen<F: Blocks>(&self, at: usize) -> __m256i {
        let codes = &self.codes[at..at + 16];
        // SAFETY: the slice has 16 bytes.
        let codes = unsafe { _mm256_cvtepu8_epi16(_mm_loadu_si128(codes.as_ptr().cast())) };
        match F::ZERO {
            0 => codes,
            zero => _mm256_sub_epi16(codes, _mm256_set1_epi16(i16::from(zero))),
        }
    }
}

/// The products of a row of weights with all of `x` as integers.
#[target_feature(enable = "avx2,fma,f16c")]
fn rounded<F: Blocks>(row: &[u8], x: &Integers, columns: usize, out: &mut [f32]) {
    let mut block = EMPTY;
    if let [out] = out {
        let (mut sums, mut mins) = (_mm256_setzero_ps(), 0.0);
        for i in 0..columns / F::NUMBERS {
            block.read::<F>(row, i);
            (sums, mins) = rounded_block::<F>(&block, x, i * F::NUMBERS, sums, mins);
        }
        *out = total(sums) + mins;
        return;
    }
    out.fill(0.0);
    for i in 0..columns / F::NUMBERS {
        block.read::<F>(row, i);
        for (n, out) in out.iter_mut().enumerate() {
            let at = n * columns + i * F::NUMBERS;
            let (sums, mins) = rounded_block::<F>(&block, x, at, _mm256_setzero_ps(), 0.0);
            *out += total(sums) + mins;
        }
    }
}

/// Adds the products of a block with what begins at `at`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn rounded_block<F: Blocks>(
    block: &Unpacked,
    x: &Integers,
    at: usize,
    mut sums: __m256,
    mut mins: f32,
) -> (__m256, f32) {
    let codes = &x.codes[at..at + F::NUMBERS];
    let (steps, of_steps) = (&x.steps[at / BLOCK..], &x.sums[at / BLOCK..]);
    for part in 0..F::NUMBERS / BLOCK {
        let mut products = [_mm256_setzero_si256(); 2];
        for (half, products) in products.iter_mut().enumerate() {
            let first = part * BLOCK + half * 16;
            // SAFETY: the codes of a block are whole parts of 32.
            let x = unsafe { _mm256_loadu_si256(codes[first..first + 16].as_ptr().cast()) };
            *products = _mm256_madd_epi16(block.sixteen::<F>(first), x);
        }
        let mut add = |products: __m256i, scale: f32| {
            let scale = _mm256_set1_ps(scale * steps[part]);
            sums = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), scale, sums);
        };
        if F::SPAN == BLOCK {
            add(_mm256_add_epi32(products[0], products[1]), block.scales[part]);
        } else {
            add(products[0], block.scales[2 * part]);
            add(products[1], block.scales[2 * part + 1]);
        }
        if F::MINS {
            mins += block.mins[part] * of_steps[part];
        }
    }
    (sums, mins)
}

/// The products of a row of weights with all of `x`, whose sums of 32 are `of_x`.
#[target_feature(enable = "avx2,fma,f16c")]
fn exact<F: Blocks>(row: &[u8], x: &[f32], of_x: &[f32], columns: usize, out: &mut [f32]) {
    let mut block = EMPTY;
    out.fill(0.0);
    for i in 0..columns / F::NUMBERS {
        block.read::<F>(row, i);
        for (n, out) in out.iter_mut().enumerate() {
            let at = n * columns + i * F::NUMBERS;
            let x = &x[at..at + F::NUMBERS];
            let (mut sums, mut mins) = (_mm256_setzero_ps(), 0.0);
            for span in 0..F::NUMBERS / F::SPAN {
                let mut products = _mm256_setzero_ps();
                for first in (span * F::SPAN..(span + 1) * F::SPAN).step_by(16) {
                    let codes = block.sixteen::<F>(first);
                    let halves =
                        [_mm256_castsi256_si128(codes), _mm256_extracti128_si256::<1>(codes)];
                    for (half, codes) in halves.into_iter().enumerate() {
                        let codes = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(codes));
                        // SAFETY: the span has whole vectors.
                        let x = unsafe { _mm256_loadu_ps(x[first + 8 * half..].as_ptr()) };
                        products = _mm256_fmadd_ps(codes, x, products);
                    }
                }
                sums = _mm256_fmadd_ps(products, _mm256_set1_ps(block.scales[span]), sums);
            }
            if F::MINS {
                for (min, of_x) in block.mins.iter().zip(&of_x[at / BLOCK..][..F::NUMBERS / BLOCK])
                {
                    mins += min * of_x;
                }
            }
            *out += total(sums) + mins;
        }
    }
}

/// The sum of all lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn total(sums: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}
