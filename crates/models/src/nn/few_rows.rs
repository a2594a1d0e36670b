//! Products of few rows with f32 weights on the CPU.
//!
//! Burn's Flex backend leaves products to the gemm crate, which has a special loop for one row and
//! copies the weights into blocks for more. For 8 rows, such as the step of a batch, the copy takes
//! longer than the rest. This module reads each row of weights once, in place, and multiplies it
//! with all rows while it is in the processor's cache. It also multiplies a single row with small
//! weights, such as a router's, for which Burn uses one thread.

use burn::{
    backend::Flex,
    tensor::{DType, Tensor, TensorData},
};
use kv_cubecl::Target;
use kv_device::threads::in_parts;
use macerator::{Scalar, Simd, Vector};

/// The most rows for which this is faster.
const FEW: usize = 32;
/// Rows of weights per task of a thread; even.
const PART: usize = 64;
/// Multiplications that justify a second thread. In a step it is awake, and joins in a microsecond.
const PARALLEL: usize = 1 << 17;
/// The most weights that are multiplied with one row here. Burn's product of one row uses a single
/// thread, but in a step of SmolLM2-135M in f32, whose matrices are mostly larger, it is a quarter
/// faster.
const SMALL: usize = 1 << 19;
/// Rows that are multiplied at once. With this many sums for each of two rows of weights, the
/// processor never waits for a sum, and all of them fit in registers.
const ROWS: usize = 4;

/// Returns `x W^T` for `x` `[rows, d_input]` and a weight `[d_output, d_input]`, both f32 on the
/// Flex backend. Returns `None` for others, for a single row with large or tiny weights, and for
/// many rows, for which Burn's own product is used.
pub(super) fn project(x: &Tensor<2>, weight: &Tensor<2>) -> Option<Tensor<2>> {
    let device = x.device();
    let ([rows, width], [d_output, _]) = (x.dims(), weight.dims());
    let few = match rows {
        1 => (PARALLEL..=SMALL).contains(&(width * d_output)),
        _ => rows <= FEW && rows * width * d_output > 0,
    };
    if !few || [x.dtype(), weight.dtype()] != [DType::F32; 2] || !kv_cubecl::Flex::hosts(&device) {
        return None;
    }
    let [x, weight] = [x, weight].map(|tensor| tensor.clone().try_into_primitive::<Flex>().ok());
    let (x, weight) = (x?, weight?);
    if !weight.layout().is_contiguous() {
        return None;
    }
    let x = if x.layout().is_contiguous() { x } else { x.to_contiguous() };
    let (from, at) = (x.layout().start_offset(), weight.layout().start_offset());
    let x = &x.storage::<f32>()[from..from + rows * width];
    let weights = &weight.storage::<f32>()[at..at + d_output * width];
    let products = TensorData::new(products(weights, x, width), [rows, d_output]);
    Some(Tensor::from_data(products, &device))
}

/// Returns `x W^T`, `[rows of x, rows of weights]`, for `x` and `weights` with rows of `width`.
fn products(weights: &[f32], x: &[f32], width: usize) -> Vec<f32> {
    let (d_output, rows) = (weights.len() / width, x.len() / width);
    let mut by_weight = vec![0.0; d_output * rows];
    let parts = weights.chunks(PART * width).zip(by_weight.chunks_mut(PART * rows));
    in_parts(parts, weights.len() * rows >= PARALLEL, |(weights, out)| {
        part(weights, x, width, out);
    });
    let mut out = Vec::with_capacity(d_output * rows);
    for row in 0..rows {
        out.extend(by_weight[row..].iter().step_by(rows));
    }
    out
}

/// Writes the products of every row of `weights` with all of `x`, `[rows of weights, rows of x]`.
#[macerator::with_simd]
fn part<S: Simd>(weights: &[f32], x: &[f32], width: usize, out: &mut [f32]) {
    let rows = x.len() / width;
    for (weights, out) in weights.chunks(2 * width).zip(out.chunks_mut(2 * rows)) {
        // An odd last row is paired with itself.
        let (first, second) = weights.split_at(width);
        let second = if second.is_empty() { first } else { second };
        let mut row = 0;
        while row < rows {
            let x = &x[row * width..];
            let out = &mut out[row..];
            let n = ROWS.min(rows - row);
            match n {
                1 => block::<S, 1>([first, second], x, rows, out),
                2 => block::<S, 2>([first, second], x, rows, out),
                3 => block::<S, 3>([first, second], x, rows, out),
                _ => block::<S, ROWS>([first, second], x, rows, out),
            }
            row += n;
        }
    }
}

/// Writes the products of two rows of weights with the first `N` rows of `x`. Products of the
/// second row follow after `stride`, if `out` has space for them.
#[inline(always)]
fn block<S: Simd, const N: usize>(weights: [&[f32]; 2], x: &[f32], stride: usize, out: &mut [f32]) {
    let width = weights[0].len();
    let lanes = f32::lanes::<S>();
    let whole = width / lanes * lanes;
    let mut sums = [[0.0f32.splat::<S>(); N]; 2];
    let mut at = 0;
    while at < whole {
        let [first, second] = [load::<S>(&weights[0][at..]), load::<S>(&weights[1][at..])];
        let mut n = 0;
        while n < N {
            let x = load::<S>(&x[n * width + at..]);
            sums[0][n] = first.mul_add(x, sums[0][n]);
            sums[1][n] = second.mul_add(x, sums[1][n]);
            n += 1;
        }
        at += lanes;
    }
    for (i, (sums, weights)) in sums.into_iter().zip(weights).enumerate() {
        if i * stride >= out.len() {
            break;
        }
        let out = &mut out[i * stride..][..N];
        for (n, (out, sum)) in out.iter_mut().zip(sums).enumerate() {
            let x = &x[n * width..];
            *out = sum.reduce_add() + (whole..width).map(|at| weights[at] * x[at]).sum::<f32>();
        }
    }
}

/// Loads a vector from the start of `x`.
#[inline(always)]
fn load<S: Simd>(x: &[f32]) -> Vector<S, f32> {
    assert!(x.len() >= f32::lanes::<S>());
    // SAFETY: the slice holds a whole vector.
    unsafe { macerator::vload_unaligned(x.as_ptr()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Covers widths below a vector, whole vectors, remainders and odd widths, with few weights,
    /// odd numbers of them, and enough for several threads. Sums of integers are exact in any
    /// order.
    #[test]
    fn products_are_exact_sums() {
        for (width, d_output, rows) in [
            (1, 1, 2),
            (7, 5, 1),
            (576, 300, 1),
            (7, 5, 2),
            (64, 33, 3),
            (576, 65, 5),
            (1103, 131, 8),
            (2048, 700, 9),
            (16, 129, 32),
        ] {
            let value = |i: usize| ((i * 37 + i / width) % 7) as f32 - 3.0;
            let x: Vec<f32> = (0..rows * width).map(value).collect();
            let weights: Vec<f32> = (0..d_output * width).map(|i| value(i + 3)).collect();
            let products = products(&weights, &x, width);
            assert_eq!(products.len(), rows * d_output);
            for (at, product) in products.into_iter().enumerate() {
                let (x, row) = (&x[at / d_output * width..], &weights[at % d_output * width..]);
                let sum: f32 = (0..width).map(|c| x[c] * row[c]).sum();
                assert_eq!(product, sum, "{width} {d_output} {rows}: {at}");
            }
        }
    }
}
