//! Byte products, for processors with AVX-512 and VNNI.
//!
//! The instruction `vpdpbusd` multiplies, in each of 16 lanes, four bytes (codes) with four signed
//! bytes (activations) and adds the products to a 32-bit sum. So products of [`Activations::Int8`]
//! are exact within a block of 32, until they are multiplied with scale and step.
//!
//! 16-bit integers are multiplied as two signed digits to base 256. Exact activations are
//! multiplied as floats: rounded to a common step, small activations beside an outlier would be
//! lost.

mod activations;
mod exact;
mod panels;
mod picked;
mod unpack;

use core::{arch::x86_64::*, ops::Range};

use super::{
    dense,
    gate::gated_products,
    stacked::Stacked,
    tuning::{AHEAD, LINE, PARALLEL},
};
use crate::{
    Activations, Gate, PackedLayout,
    formats::vnni::{self, GROUP, Groups, MOST_BYTES},
};
use activations::{Group, groups};
pub(super) use picked::project_picked;

/// The most rows of activations multiplied with a row of weights at a time. The sums of more do not
/// fit into registers.
const ROWS: usize = 6;
/// Rows of weights multiplied with one row of activations at a time, so that activations are loaded
/// once for all. The rows are in different parts of the matrix, and each part is read in memory
/// order.
const TOGETHER: usize = 4;

/// Returns whether this processor has the instructions.
pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

/// Rows of activations from which weights are unpacked into panels. Measured on two threads of an
/// EPYC of Zen 4, all products of SmolLM2-135M in Q4_1: 6 rows take as long either way, 8 rows 0.76
/// of the time.
const MANY: usize = 7;
/// Rows of exact activations from which parts of the matrix are restored. Measured on one thread of
/// an EPYC of Zen 5, all products of SmolLM2-135M in Q4_1: 8 rows take 22 ms without restoring; 12
/// rows take 37 ms without and 65 ms with; 32 rows take 84 ms with.
const MANY_EXACT: usize = 32;

/// Returns `x W^T`, `[rows of x, rows]`, with a gate of the halves of the rows.
pub(super) fn project<F: Groups>(
    x: &[f32],
    matrix: &Stacked<'_>,
    activations: Activations,
    gate: Option<Gate>,
) -> Vec<f32> {
    match activations {
        Activations::Exact if x.len() / matrix.columns() >= MANY_EXACT => {
            gated_products(dense::project(x, matrix), matrix, gate)
        }
        Activations::Exact => {
            let x = exact::groups(x, matrix.columns());
            gated_products(few::<F, _>(&x, matrix), matrix, gate)
        }
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
    if x.len() / columns >= MANY {
        return panels::project::<F, D>(x, matrix, gate);
    }
    // SAFETY: the processor has the instructions, as asserted.
    let x = unsafe { groups::<F, D>(x, columns) };
    gated_products(few::<F, _>(&x, matrix), matrix, gate)
}

/// 128 activations as they are multiplied. The last group of a row is padded with zeros.
trait Multiplied: Copy + Sync {
    /// Cost of a product, in units of a byte product.
    const WORK: usize;

    /// Adds the products of `C` times 128 numbers to `sum`.
    ///
    /// # Safety
    /// The processor has AVX-512 with BW, DQ, VL and VNNI.
    unsafe fn add<F: Groups, const C: usize>(
        sum: &mut Sum,
        weights: &vnni::Group<C>,
        x: [&Self; C],
    );
}

impl<const D: usize> Multiplied for Group<D> {
    const WORK: usize = D;

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn add<F: Groups, const C: usize>(
        sum: &mut Sum,
        weights: &vnni::Group<C>,
        x: [&Self; C],
    ) {
        sum.add::<F, D, C>(weights, x);
    }
}

/// Multiplies all rows of weights with few rows of `x`.
fn few<F: Groups, X: Multiplied>(x: &[X], matrix: &Stacked<'_>) -> Vec<f32> {
    assert!(available());
    let n = x.len() / matrix.columns().div_ceil(GROUP);
    let parallel = matrix.rows() * matrix.columns() * n * X::WORK >= PARALLEL;
    matrix.by_weight_rows(n, parallel, |blocks, out| {
        // SAFETY: the processor has the instructions, as asserted.
        unsafe { some_rows::<F, X>(blocks, matrix.layout(), x, out) };
    })
}

/// Multiplies the first rows of `blocks` with all of `x`, to fill `out`,
/// `[rows of weights, rows of x]`.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn some_rows<F: Groups, X: Multiplied>(
    blocks: &[u8],
    layout: &PackedLayout,
    x: &[X],
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
            let products = weights.multiply::<F, X, TOGETHER, 1>(rows, x);
            for (row, [product]) in rows.into_iter().zip(products) {
                out[row] = product;
            }
        }
        for (row, out) in out.iter_mut().enumerate().skip(TOGETHER * part) {
            [[*out]] = weights.multiply::<F, X, 1, 1>([row], x);
        }
        return;
    }
    // As few parts as fit, because each unpacks the weights again.
    let part = n.div_ceil(n.div_ceil(ROWS));
    for (row, out) in out.chunks_exact_mut(n).enumerate() {
        for (x, out) in x.chunks(part * groups).zip(out.chunks_mut(part)) {
            match out.len() {
                1 => out.copy_from_slice(&weights.multiply::<F, X, 1, 1>([row], x)[0]),
                2 => out.copy_from_slice(&weights.multiply::<F, X, 1, 2>([row], x)[0]),
                3 => out.copy_from_slice(&weights.multiply::<F, X, 1, 3>([row], x)[0]),
                4 => out.copy_from_slice(&weights.multiply::<F, X, 1, 4>([row], x)[0]),
                5 => out.copy_from_slice(&weights.multiply::<F, X, 1, 5>([row], x)[0]),
                _ => out.copy_from_slice(&weights.multiply::<F, X, 1, ROWS>([row], x)[0]),
            }
        }
    }
}

/// Rows of weights.
struct Rows<'a> {
    /// The rows and the bytes that follow them.
    blocks: &'a [u8],
    /// Bytes of a row.
    row: usize,
    /// Complete groups of a row.
    groups: usize,
    /// Blocks of a row after its complete groups.
    rest: usize,
}

impl Rows<'_> {
    /// Multiplies `W` rows of weights with `N` rows of `x`.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn multiply<F: Groups, X: Multiplied, const W: usize, const N: usize>(
        &self,
        rows: [usize; W],
        x: &[X],
    ) -> [[f32; N]; W] {
        let groups = self.groups + usize::from(self.rest > 0);
        assert!(x.len() == N * groups);
        let mut blocks = [self.blocks; W];
        for (blocks, row) in blocks.iter_mut().zip(rows) {
            *blocks = &self.blocks[row * self.row..][..self.row];
        }
        assert!(self.row >= (self.groups * GROUP / F::NUMBERS + self.rest) * F::BYTES);
        let mut sums = [[Sum::zero(); N]; W];
        let group_bytes = GROUP * F::BYTES / F::NUMBERS;
        let (pairs, last) = (self.groups / 2, self.groups - self.groups % 2);
        // SAFETY: each row of `x` has `groups` groups, as asserted.
        let x_at = |n: usize, i: usize| unsafe { x.get_unchecked(n * groups + i) };
        for pair in 0..pairs {
            for (blocks, sums) in blocks.iter().zip(&mut sums) {
                prefetch(blocks.as_ptr().wrapping_add(2 * pair * group_bytes), 2 * group_bytes);
                // SAFETY: the row has this pair of groups, as asserted.
                let weights = unsafe { F::pair(blocks.as_ptr(), pair) };
                for (n, sum) in sums.iter_mut().enumerate() {
                    let x = [0, 1].map(|i| x_at(n, 2 * pair + i));
                    // SAFETY: this function is compiled for these instructions.
                    unsafe { X::add::<F, 2>(sum, &weights, x) };
                }
            }
        }
        if last < self.groups {
            for (blocks, sums) in blocks.iter().zip(&mut sums) {
                prefetch(blocks.as_ptr().wrapping_add(last * group_bytes), group_bytes);
                // SAFETY: the row has this group, as asserted.
                let weights = unsafe { F::group(blocks.as_ptr(), last) };
                for (n, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: as above.
                    unsafe { X::add::<F, 1>(sum, &weights, [x_at(n, last)]) };
                }
            }
        }
        let mut products = [[0.0; N]; W];
        for ((row, mut sums), products) in rows.into_iter().zip(sums).zip(&mut products) {
            if self.rest > 0 {
                let weights = self.last::<F>(row);
                for (n, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: as above.
                    unsafe { X::add::<F, 1>(sum, &weights, [&x[n * groups + self.groups]]) };
                }
            }
            *products = sums.map(|sum| sum.total());
        }
        products
    }

    /// Returns the incomplete last group of a row, with scales and minima of 0 for missing blocks.
    /// May read bytes that follow the row.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn last<F: Groups>(&self, row: usize) -> vnni::Group<1> {
        assert!(F::NUMBERS <= GROUP);
        let start = row * self.row + self.groups * GROUP / F::NUMBERS * F::BYTES;
        let mut weights = match self.blocks.get(start..start + GROUP / F::NUMBERS * F::BYTES) {
            // SAFETY: the slice holds all blocks of a group.
            Some(blocks) => unsafe { F::group(blocks.as_ptr(), 0) },
            None => {
                let mut copy = [0u8; MOST_BYTES];
                let rest = &self.blocks[start..][..self.rest * F::BYTES];
                copy[..rest.len()].copy_from_slice(rest);
                // SAFETY: the copy has room for all blocks of a group.
                unsafe { F::group(copy.as_ptr(), 0) }
            }
        };
        let there = (1 << (self.rest * F::NUMBERS / 32)) - 1;
        weights.scales = weights.scales.map(|scales| _mm256_maskz_mov_ps(there, scales));
        weights.mins = _mm256_maskz_mov_ps(there, weights.mins);
        weights
    }
}

/// Prefetches the bytes that are [`AHEAD`] of these.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn prefetch(bytes: *const u8, count: usize) {
    for line in 0..count.div_ceil(LINE) {
        _mm_prefetch::<_MM_HINT_T0>(bytes.wrapping_add(AHEAD + line * LINE).cast());
    }
}

/// The partial sums of a product of two rows.
#[derive(Clone, Copy)]
struct Sum {
    products: __m512,
    /// Minima times sums of activations.
    mins: __m256,
}

impl Sum {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn zero() -> Self {
        Self { products: _mm512_setzero_ps(), mins: _mm256_setzero_ps() }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn add<F: Groups, const D: usize, const C: usize>(
        &mut self,
        weights: &vnni::Group<C>,
        x: [&Group<D>; C],
    ) {
        let steps = eight(x.map(|x| &x.of_blocks.steps));
        // A single scale for 32 numbers appears in both halves.
        let halves = 32 / F::SPAN;
        for part in 0..halves {
            let scales = _mm512_castps256_ps512(_mm256_mul_ps(weights.scales[part], steps));
            #[expect(
                clippy::needless_range_loop,
                reason = "with iterators the loop is not unrolled and sums are spilled to memory"
            )]
            for i in 0..C {
                // Each block of 32 is spread over four lanes.
                let four = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
                let lanes = _mm512_add_epi32(four, _mm512_set1_epi32(4 * i as i32));
                let scales = _mm512_permutexvar_ps(lanes, scales);
                let vectors = part * 2 / halves..(part + 1) * 2 / halves;
                let products = products::<F, D>(&weights.codes[i], x[i], vectors);
                self.products = _mm512_fmadd_ps(products, scales, self.products);
            }
        }
        if F::MINS {
            let sums = eight(x.map(|x| &x.of_blocks.sums));
            self.mins = _mm256_fmadd_ps(weights.mins, sums, self.mins);
        }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn total(self) -> f32 {
        _mm512_reduce_add_ps(_mm512_add_ps(self.products, _mm512_zextps256_ps512(self.mins)))
    }
}

/// Loads one or two times four floats, padded with zeros.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn eight<const C: usize>(fours: [&[f32; 4]; C]) -> __m256 {
    // SAFETY: the arrays have four floats.
    let four = |i: usize| unsafe { _mm_loadu_ps(fours[i].as_ptr()) };
    let eight = _mm256_zextps128_ps256(four(0));
    if C == 1 { eight } else { _mm256_insertf128_ps::<1>(eight, four(1)) }
}

/// Multiplies codes with the integers that the digits make up, for a range of the two vectors.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn products<F: Groups, const D: usize>(
    codes: &[__m512i; 2],
    x: &Group<D>,
    vectors: Range<usize>,
) -> __m512 {
    let zero = _mm512_setzero_si512();
    let add = |sum, digit: usize| add_bytes(sum, codes, &x.digits[digit], vectors.clone());
    // The sum of eight products of a byte and a digit has 18 bits.
    let second = if D > 1 { _mm512_slli_epi32::<8>(add(zero, 1)) } else { zero };
    let lower = if F::ZERO == 0 {
        add(second, 0)
    } else {
        // The correction covers both digits.
        _mm512_add_epi32(add(x.of_blocks.corrections(vectors.start), 0), second)
    };
    _mm512_cvtepi32_ps(lower)
}

/// Adds the products of codes with a digit, four to a lane.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn add_bytes(
    mut sum: __m512i,
    codes: &[__m512i; 2],
    digits: &[[i8; 64]; 2],
    vectors: Range<usize>,
) -> __m512i {
    for i in vectors {
        sum = _mm512_dpbusd_epi32(sum, codes[i], load(digits[i].as_ptr()));
    }
    sum
}

/// Loads 64 bytes.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn load<T: Copy>(x: *const T) -> __m512i {
    // SAFETY: all callers pass arrays of 64 bytes.
    unsafe { _mm512_loadu_si512(x.cast()) }
}
