//! Products of bytes, for processors that multiply them: AVX-512 with VNNI.
//!
//! The instruction `vpdpbusd` multiplies, in each of 16 lanes, four bytes (here: codes) with four signed bytes
//! (activations) and adds the products to a 32-bit sum, so that a step of [`Activations::Int8`] is exact in integers
//! until it is multiplied with the two scales of its 32 numbers.
//!
//! Integers of 16 bits are multiplied the same way, as two signed digits to base 256, and exact activations as three, of
//! integers of 23 bits: the largest of each 32 activations is scaled to the largest of these. That changes an activation
//! by at most 2^-23 of the largest of its 32, about as much as rounding a sum of f32 does.

mod activations;
mod panels;

use core::arch::x86_64::*;

use super::{AHEAD, LINE, PARALLEL, gated, stacked::Stacked};
use crate::{
    Activations, Gate, PackedLayout,
    formats::vnni::{self, GROUP, Groups, MOST_BYTES},
};
use activations::{BASE_OF_THIRD, Group, groups};

/// Rows of activations that are multiplied with a row of weights at a time.
const ROWS: usize = 4;
/// Rows of weights that are multiplied with a row of activations at a time, so that these are loaded once for all. They
/// lie in as many parts of the matrix, each of which is so read in the order of memory.
const TOGETHER: usize = 4;

/// Whether this processor has the instructions.
pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

/// From so many rows of activations on, weights are unpacked into panels.
const MANY: usize = 12;

/// `x W^T`, `[rows of x, rows]`, with a gate of the halves of the rows.
pub(super) fn project<F: Groups>(
    x: &[f32],
    matrix: &Stacked<'_>,
    activations: Activations,
    gate: Option<Gate>,
) -> Vec<f32> {
    match activations {
        Activations::Exact => by_digits::<F, 3>(x, matrix, gate),
        Activations::Int16 => by_digits::<F, 2>(x, matrix, gate),
        Activations::Int8 => by_digits::<F, 1>(x, matrix, gate),
    }
}

fn by_digits<F: Groups, const D: usize>(
    x: &[f32],
    matrix: &Stacked<'_>,
    gate: Option<Gate>,
) -> Vec<f32> {
    assert!(available());
    let columns = matrix.columns();
    let n = x.len() / columns;
    if n >= MANY {
        return panels::project::<F, D>(x, matrix, gate);
    }
    // SAFETY: the processor has the instructions, as asserted.
    let x = unsafe { groups::<F, D>(x, columns) };
    let parallel = matrix.rows() * columns * n * D >= PARALLEL;
    let products = matrix.by_weight_rows(n, parallel, |blocks, out| {
        // SAFETY: the processor has the instructions, as asserted.
        unsafe { some_rows::<F, D>(blocks, matrix.layout(), &x, out) };
    });
    gated(products, matrix, gate)
}

/// The products of the first rows of `blocks`, as many as fit `out`, with all of `x`: `[rows of weights, rows of x]`.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn some_rows<F: Groups, const D: usize>(
    blocks: &[u8],
    layout: &PackedLayout,
    x: &[Group<D>],
    out: &mut [f32],
) {
    let columns = layout.columns();
    let rest = columns % GROUP / F::NUMBERS;
    let weights = Rows { blocks, row: layout.row_bytes(), groups: columns / GROUP, rest };
    let groups = columns.div_ceil(GROUP);
    let n = x.len() / groups;
    if n == 1 {
        let part = out.len() / TOGETHER;
        for row in 0..part {
            let rows = core::array::from_fn(|i| row + i * part);
            let products = weights.multiply::<F, D, TOGETHER, 1>(rows, x);
            for (row, [product]) in rows.into_iter().zip(products) {
                out[row] = product;
            }
        }
        for (row, out) in out.iter_mut().enumerate().skip(TOGETHER * part) {
            [[*out]] = weights.multiply::<F, D, 1, 1>([row], x);
        }
        return;
    }
    for (row, out) in out.chunks_exact_mut(n).enumerate() {
        for (x, out) in x.chunks(ROWS * groups).zip(out.chunks_mut(ROWS)) {
            match out.len() {
                1 => out.copy_from_slice(&weights.multiply::<F, D, 1, 1>([row], x)[0]),
                2 => out.copy_from_slice(&weights.multiply::<F, D, 1, 2>([row], x)[0]),
                3 => out.copy_from_slice(&weights.multiply::<F, D, 1, 3>([row], x)[0]),
                _ => out.copy_from_slice(&weights.multiply::<F, D, 1, ROWS>([row], x)[0]),
            }
        }
    }
}

/// Rows of weights.
struct Rows<'a> {
    /// Theirs, and what follows them.
    blocks: &'a [u8],
    /// Bytes of a row.
    row: usize,
    /// Whole groups of a row.
    groups: usize,
    /// Blocks after them.
    rest: usize,
}

impl Rows<'_> {
    /// The products of `W` rows with `N` rows of `x`.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn multiply<F: Groups, const D: usize, const W: usize, const N: usize>(
        &self,
        rows: [usize; W],
        x: &[Group<D>],
    ) -> [[f32; N]; W] {
        let groups = self.groups + usize::from(self.rest > 0);
        assert!(x.len() == N * groups);
        let mut blocks = [self.blocks; W];
        for (blocks, row) in blocks.iter_mut().zip(rows) {
            *blocks = &self.blocks[row * self.row..][..self.row];
        }
        assert!(self.row >= (self.groups * GROUP / F::NUMBERS + self.rest) * F::BYTES);
        let mut sums = [[_mm512_setzero_ps(); N]; W];
        let group_bytes = GROUP * F::BYTES / F::NUMBERS;
        for i in 0..self.groups {
            for (blocks, sums) in blocks.iter().zip(&mut sums) {
                let ahead = blocks.as_ptr().wrapping_add(i * group_bytes + AHEAD);
                for line in 0..group_bytes.div_ceil(LINE) {
                    _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line * LINE).cast());
                }
                // SAFETY: whole groups are in the row, as asserted.
                let weights = unsafe { F::group(blocks.as_ptr(), i) };
                for (n, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: there are as many groups of each row of `x`, as asserted.
                    let x = unsafe { x.get_unchecked(n * groups + i) };
                    *sum = add::<F, D>(*sum, &weights, x);
                }
            }
        }
        let mut products = [[0.0; N]; W];
        for ((row, mut sums), products) in rows.into_iter().zip(sums).zip(&mut products) {
            if self.rest > 0 {
                let weights = self.last::<F>(row);
                for (n, sum) in sums.iter_mut().enumerate() {
                    *sum = add::<F, D>(*sum, &weights, &x[n * groups + self.groups]);
                }
            }
            for (product, sum) in products.iter_mut().zip(sums) {
                *product = _mm512_reduce_add_ps(sum);
            }
        }
        products
    }

    /// The incomplete group of a row, with scales and minima that are 0 where there is none. What follows the row is
    /// read as well, if it is there.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn last<F: Groups>(&self, row: usize) -> vnni::Group {
        assert!(F::NUMBERS <= GROUP);
        let start = row * self.row + self.groups * GROUP / F::NUMBERS * F::BYTES;
        let mut weights = match self.blocks.get(start..start + GROUP / F::NUMBERS * F::BYTES) {
            // SAFETY: the blocks of a group are in the slice.
            Some(blocks) => unsafe { F::group(blocks.as_ptr(), 0) },
            None => {
                let mut copy = [0u8; MOST_BYTES];
                let rest = &self.blocks[start..][..self.rest * F::BYTES];
                copy[..rest.len()].copy_from_slice(rest);
                // SAFETY: the copy has room for the blocks of a group.
                unsafe { F::group(copy.as_ptr(), 0) }
            }
        };
        let there = (1 << (self.rest * F::NUMBERS / 32 * 4)) - 1;
        weights.scales = weights.scales.map(|scales| _mm512_maskz_mov_ps(there, scales));
        weights.mins = _mm512_maskz_mov_ps(there, weights.mins);
        weights
    }
}

/// Adds the products of 128 numbers.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn add<F: Groups, const D: usize>(sum: __m512, weights: &vnni::Group, x: &Group<D>) -> __m512 {
    let one_scale = F::SPAN == 32;
    let mut products = [[_mm512_setzero_si512(); 2]; D];
    for (digit, products) in products.iter_mut().enumerate() {
        let [first, second] = &x.digits[digit];
        let [mut a, mut b] = *products;
        // Those of the second digit are counted with the first.
        if F::ZERO != 0 && digit != 1 {
            let corrections = |half: usize| match digit {
                0 => x.of_blocks.corrections(half),
                _ => x.of_blocks.third(half),
            };
            a = corrections(0);
            if !one_scale {
                b = corrections(1);
            }
        }
        a = _mm512_dpbusd_epi32(a, weights.codes[0], load(first.as_ptr()));
        if one_scale {
            a = _mm512_dpbusd_epi32(a, weights.codes[1], load(second.as_ptr()));
        } else {
            b = _mm512_dpbusd_epi32(b, weights.codes[1], load(second.as_ptr()));
        }
        *products = [a, b];
    }
    let steps = x.of_blocks.steps();
    let scaled = |half: usize| _mm512_mul_ps(weights.scales[half], steps);
    let mut sum = _mm512_fmadd_ps(total(products.map(|halves| halves[0])), scaled(0), sum);
    if !one_scale {
        sum = _mm512_fmadd_ps(total(products.map(|halves| halves[1])), scaled(1), sum);
    }
    if F::MINS {
        sum = _mm512_fmadd_ps(weights.mins, x.of_blocks.sums(), sum);
    }
    sum
}

/// What the products of digits stand for: lowest first, to base 256.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn total<const D: usize>(digits: [__m512i; D]) -> __m512 {
    if D == 1 {
        return _mm512_cvtepi32_ps(digits[0]);
    }
    // Eight products of a byte and a digit have 18 bits.
    let lower = _mm512_add_epi32(digits[0], _mm512_slli_epi32::<8>(digits[1]));
    let lower = _mm512_cvtepi32_ps(lower);
    if D == 2 {
        return lower;
    }
    _mm512_fmadd_ps(_mm512_cvtepi32_ps(digits[2]), _mm512_set1_ps(BASE_OF_THIRD), lower)
}

/// 64 bytes.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn load<T: Copy>(x: *const T) -> __m512i {
    // SAFETY: all callers have arrays of 64 bytes.
    unsafe { _mm512_loadu_si512(x.cast()) }
}
