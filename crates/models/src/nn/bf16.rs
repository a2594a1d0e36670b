//! Products with bf16 weights on the CPU.
//!
//! Burn's Flex backend makes a transposed copy of the matrix for every product, and then a copy of
//! that in f32. A decode step then takes 9x as long as with weights in f32. This module multiplies
//! few rows with the weights in place, and many with a single copy in f32. Burn's products of f16
//! make no copies.

use burn::{
    backend::Flex,
    tensor::{DType, Tensor, TensorData},
};
use half::bf16;
use kv_cubecl::Target;
use macerator::{Scalar, Simd, Vector};
use rayon::prelude::*;

/// The most rows of `x` that are multiplied without a copy in f32.
const FEW: usize = 8;
/// Rows of weights per task of a thread.
const PART: usize = 64;
/// Multiplications that justify a second thread, which takes about 50 us to wake.
const PARALLEL: usize = 1 << 20;

/// Returns `x W^T` for `x` `[rows, d_input]` and a weight `[d_output, d_input]`, both bf16 on the
/// Flex backend. Returns `None` for others, for which Burn's own product is used.
pub(super) fn project(x: &Tensor<2>, weight: &Tensor<2>) -> Option<Tensor<2>> {
    let device = x.device();
    let served = [x.dtype(), weight.dtype()] == [DType::BF16; 2] && cfg!(target_endian = "little");
    if !served || !kv_cubecl::Flex::hosts(&device) {
        return None;
    }
    let ([rows, width], [d_output, _]) = (x.dims(), weight.dims());
    let x = x.clone().cast(DType::F32);
    if rows > FEW {
        let weight = weight.clone().cast(DType::F32);
        return Some(x.matmul(weight.transpose()).cast(DType::BF16));
    }
    let x: Vec<f32> = x.into_data().try_into_vec().ok()?;
    let weight = weight.clone().try_into_primitive::<Flex>().ok()?;
    let weight = if weight.layout().is_contiguous() { weight } else { weight.to_contiguous() };
    let start = weight.layout().start_offset();
    let weights = &weight.storage::<bf16>()[start..start + d_output * width];
    let products = TensorData::new(products(weights, &x, width), [rows, d_output]);
    Some(Tensor::from_data(products, (&device, DType::BF16)))
}

/// Returns `x W^T`, `[rows of x, rows of weights]`, for `x` and `weights` with rows of `width`.
fn products(weights: &[bf16], x: &[f32], width: usize) -> Vec<bf16> {
    let (d_output, rows) = (weights.len() / width, x.len() / width);
    let x: Vec<Split> = x.chunks_exact(width).map(Split::new).collect();
    let part = |weights: &[bf16]| {
        let mut out = Vec::with_capacity(rows * (weights.len() / width));
        part(weights, &x, width, &mut out);
        out
    };
    let parts: Vec<Vec<f32>> = match weights.len() * rows < PARALLEL {
        true => vec![part(weights)],
        false => weights.par_chunks(PART * width).map(part).collect(),
    };
    let mut out = Vec::with_capacity(rows * d_output);
    for i in 0..rows {
        let row = parts.iter().flat_map(|part| part[i..].iter().step_by(rows));
        out.extend(row.map(|&sum| bf16::from_f32(sum)));
    }
    out
}

/// The even and odd elements of a row, and the last element of an odd number.
struct Split {
    even: Vec<f32>,
    odd: Vec<f32>,
    last: Option<f32>,
}

impl Split {
    fn new(x: &[f32]) -> Self {
        let (pairs, last) = x.as_chunks::<2>();
        let (even, odd) = pairs.iter().map(|[even, odd]| (*even, *odd)).unzip();
        Self { even, odd, last: last.first().copied() }
    }
}

/// Appends the products of every row of `weights` with all of `x`.
#[macerator::with_simd]
fn part<S: Simd>(weights: &[bf16], x: &[Split], width: usize, out: &mut Vec<f32>) {
    for row in weights.chunks_exact(width) {
        for x in x {
            out.push(dot::<S>(row, x));
        }
    }
}

/// Returns the sum of `row[i] * x[i]`. Four partial sums hide the latency of additions.
#[inline(always)]
fn dot<S: Simd>(row: &[bf16], x: &Split) -> f32 {
    let lanes = f32::lanes::<S>();
    let pairs = row.len() / 2;
    let whole = pairs / lanes * lanes;
    let mut sums = [[0.0f32.splat::<S>(); 2]; 2];
    let twos = whole / (2 * lanes) * (2 * lanes);
    for at in (0..twos).step_by(2 * lanes) {
        for (i, sums) in sums.iter_mut().enumerate() {
            add_pairs(row, x, at + i * lanes, sums);
        }
    }
    if twos < whole {
        add_pairs(row, x, twos, &mut sums[0]);
    }
    let [[p, q], [r, s]] = sums;
    let mut sum = ((p + q) + (r + s)).reduce_add();
    for at in whole..pairs {
        sum += row[2 * at].to_f32() * x.even[at] + row[2 * at + 1].to_f32() * x.odd[at];
    }
    match (row.last(), x.last) {
        (Some(weight), Some(x)) => sum + weight.to_f32() * x,
        _ => sum,
    }
}

/// Adds a vector of products of pairs from `at` on, even and odd ones separately. In a word of two
/// weights, the lower weight becomes f32 by a shift and the upper one by a mask.
#[inline(always)]
fn add_pairs<S: Simd>(row: &[bf16], x: &Split, at: usize, sums: &mut [Vector<S, f32>; 2]) {
    let words = words::<S>(&row[2 * at..]);
    let even = S::typed::<f32>(*(words << 16));
    let odd = S::typed::<f32>(*(words & 0xffff_0000u32.splat()));
    sums[0] = even.mul_add(load(&x.even[at..]), sums[0]);
    sums[1] = odd.mul_add(load(&x.odd[at..]), sums[1]);
}

/// Loads a vector from the start of `x`.
#[inline(always)]
fn load<S: Simd>(x: &[f32]) -> Vector<S, f32> {
    assert!(x.len() >= f32::lanes::<S>());
    // SAFETY: the slice holds a whole vector.
    unsafe { macerator::vload_unaligned(x.as_ptr()) }
}

/// Loads words from the start of `x`, each with two elements, the first in the lower half.
#[inline(always)]
fn words<S: Simd>(x: &[bf16]) -> Vector<S, u32> {
    assert!(x.len() >= 2 * u32::lanes::<S>());
    // SAFETY: the slice holds a whole vector, which need not be aligned, and every bit pattern is a
    // u32.
    unsafe { macerator::vload_unaligned(x.as_ptr().cast::<u32>()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Covers widths below a vector, whole vectors, remainders and odd widths, with few weights and
    /// with enough for several threads. Sums of integers are exact in any order.
    #[test]
    fn products_are_exact_sums_rounded_once() {
        for (width, d_output, rows) in
            [(1, 1, 1), (7, 5, 2), (64, 33, 1), (576, 65, 3), (1103, 130, 8), (2048, 700, 2)]
        {
            let value = |i: usize| ((i * 37 + i / width) % 7) as f32 - 3.0;
            let x: Vec<f32> = (0..rows * width).map(value).collect();
            let weights: Vec<bf16> =
                (0..d_output * width).map(|i| bf16::from_f32(value(i + 3))).collect();
            let products = products(&weights, &x, width);
            assert_eq!(products.len(), rows * d_output);
            for (at, product) in products.into_iter().enumerate() {
                let (x, row) = (&x[at / d_output * width..], &weights[at % d_output * width..]);
                let sum: f32 = (0..width).map(|c| x[c] * row[c].to_f32()).sum();
                assert_eq!(product, bf16::from_f32(sum), "{width} {d_output} {rows}: {at}");
            }
        }
    }
}
