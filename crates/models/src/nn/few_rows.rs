//! Products of few rows with f32 weights on the CPU.
//!
//! Burn's Flex backend leaves products to the gemm crate, which has a loop of its own for one row,
//! and copies the weights into blocks for more: with 8 rows, the step of a batch, that takes longer
//! than all else. Here each row of weights is read once, where it lies, and multiplied with all
//! rows while it is in the processor's cache.

use burn::{
    backend::Flex,
    tensor::{DType, Tensor, TensorData},
};
use kv_cubecl::Target;
use kv_weights::in_parts;
use macerator::{Scalar, Simd, Vector};

/// The most rows for which this is faster.
const FEW: usize = 32;
/// Rows of weights that a thread takes at a time; even.
const PART: usize = 64;
/// Multiplications that are worth a second thread, which takes some 50 us to wake.
const PARALLEL: usize = 1 << 20;
/// Rows that are multiplied at once: with as many sums for each of two rows of weights, there are
/// enough for the processor not to wait for any, and registers for all.
const ROWS: usize = 4;

/// `x W^T` for `x` `[rows, d_input]` and a weight of `[d_output, d_input]`, both f32 on the Flex backend; `None` for
/// others, and where there are not few rows or only one, for which Burn's own product will do.
pub(super) fn project(x: &Tensor<2>, weight: &Tensor<2>) -> Option<Tensor<2>> {
    let device = x.device();
    let ([rows, width], [d_output, _]) = (x.dims(), weight.dims());
    let few = (2..=FEW).contains(&rows) && width > 0 && d_output > 0;
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

/// `x W^T` for `x` and `weights` in rows of `width`, `[rows of x, rows of weights]`.
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

/// The products of every row of `weights` with all of `x`, `[rows of weights, rows of x]`.
#[macerator::with_simd]
fn part<S: Simd>(weights: &[f32], x: &[f32], width: usize, out: &mut [f32]) {
    let rows = x.len() / width;
    for (weights, out) in weights.chunks(2 * width).zip(out.chunks_mut(2 * rows)) {
        // An odd last row is its own partner.
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

/// The products of two rows of weights with the first `N` of `x`; those of the second are `stride`
/// after those of the first, if there is room for them.
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

/// A vector of the first elements of `x`.
#[inline(always)]
fn load<S: Simd>(x: &[f32]) -> Vector<S, f32> {
    assert!(x.len() >= f32::lanes::<S>());
    // SAFETY: the slice holds a whole vector.
    unsafe { macerator::vload_unaligned(x.as_ptr()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Widths below a vector, of whole vectors, with a rest and odd; few weights, odd numbers of
    /// them, and enough for several threads. The sums are of integers, so that they are exact in
    /// any order.
    #[test]
    fn products_are_exact_sums() {
        for (width, d_output, rows) in [
            (1, 1, 2),
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
