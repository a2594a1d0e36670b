//! The root mean square norm on the CPU, in one pass over each row.
//!
//! Burn's Flex backend computes it in five operations with five results. For the row of a decode
//! step, they take several times as long as the arithmetic.

#![allow(
    clippy::extra_unused_type_parameters,
    reason = "macerator compiles a function for its first type parameter, used or not"
)]

use core::mem::MaybeUninit;

use burn::{
    backend::Flex,
    tensor::{DType, Tensor, TensorData},
};
use kv_cubecl::Target;
use kv_device::threads::in_parts;
use macerator::Simd;

/// The approximate number of elements per task of a thread.
const PART: usize = 1 << 14;
/// Partial sums, so that the compiler vectorizes them.
const SUMS: usize = 32;

/// Returns `x / sqrt(mean(x^2) + epsilon) * (gains + shift)` over the last axis of `x`, if `x` and
/// the gains are f32 on the Flex backend.
pub(super) fn normed<const D: usize>(
    x: &Tensor<D>,
    gains: &Tensor<1>,
    epsilon: f64,
    shift: f32,
) -> Option<Tensor<D>> {
    let device = x.device();
    let ([width], shape) = (gains.dims(), x.shape());
    let f32s = [x.dtype(), gains.dtype()] == [DType::F32; 2];
    if !f32s || width == 0 || shape[D - 1] != width || !kv_cubecl::Flex::hosts(&device) {
        return None;
    }
    let x = x.clone().try_into_primitive::<Flex>().ok()?;
    let gains = gains.clone().try_into_primitive::<Flex>().ok()?;
    let x = if x.layout().is_contiguous() { x } else { x.to_contiguous() };
    let gains = if gains.layout().is_contiguous() { gains } else { gains.to_contiguous() };
    let (from, at) = (x.layout().start_offset(), gains.layout().start_offset());
    let x = &x.storage::<f32>()[from..from + shape.num_elements()];
    let gains = &gains.storage::<f32>()[at..at + width];
    // The buffer is not cleared first, because one thread would do that.
    let mut out = Vec::with_capacity(x.len());
    let part = PART.div_ceil(width) * width;
    let parts = x.chunks(part).zip(out.spare_capacity_mut()[..x.len()].chunks_mut(part));
    in_parts(parts, x.len() > 2 * part, |(x, out)| rows(x, gains, epsilon as f32, shift, out));
    // SAFETY: all parts have been written.
    unsafe { out.set_len(x.len()) };
    Some(Tensor::from_data(TensorData::new(out, shape), &device))
}

/// Writes the norms of rows as wide as `gains`.
#[macerator::with_simd]
fn rows<S: Simd>(x: &[f32], gains: &[f32], epsilon: f32, shift: f32, out: &mut [MaybeUninit<f32>]) {
    for (x, out) in x.chunks_exact(gains.len()).zip(out.chunks_exact_mut(gains.len())) {
        let (vectors, rest) = x.as_chunks::<SUMS>();
        let mut sums = [0.0f32; SUMS];
        for x in vectors {
            for (sum, x) in sums.iter_mut().zip(x) {
                *sum += x * x;
            }
        }
        let squares = sums.iter().sum::<f32>() + rest.iter().map(|x| x * x).sum::<f32>();
        let root = (squares / gains.len() as f32 + epsilon).sqrt();
        for ((out, x), gain) in out.iter_mut().zip(x).zip(gains) {
            out.write(x / root * (gain + shift));
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    /// Compares with f64 for widths below a vector, whole vectors and remainders, with one row and
    /// with enough for several threads.
    #[test]
    fn norms_match_f64() {
        let device = Device::flex();
        for (rows, width, shift) in [(1, 1, 0.0), (3, 7, 1.0), (1, 2048, 0.0), (300, 131, 1.0)] {
            let value = |i: usize| ((i * 7919) % 2003) as f32 / 100.0 - 10.0;
            let x: Vec<f32> = (0..rows * width).map(value).collect();
            let gains: Vec<f32> = (0..width).map(|i| value(i + 5)).collect();
            let tensor =
                Tensor::<3>::from_data(TensorData::new(x.clone(), [1, rows, width]), &device);
            let gain = Tensor::<1>::from_data(TensorData::new(gains.clone(), [width]), &device);
            // A view without the first row does not begin at the start of its buffer.
            for first in 0..rows.min(2) {
                let view = tensor.clone().narrow(1, first, rows - first);
                let got = normed(&view, &gain, 1e-5, shift).unwrap();
                let got = got.into_data().try_into_vec::<f32>().unwrap();
                assert_eq!(got.len(), (rows - first) * width);
                for (row, got) in x[first * width..].chunks(width).zip(got.chunks(width)) {
                    let squares: f64 = row.iter().map(|&x| f64::from(x).powi(2)).sum();
                    let root = (squares / width as f64 + 1e-5).sqrt();
                    for ((x, gain), got) in row.iter().zip(&gains).zip(got) {
                        let expected = f64::from(*x) / root * f64::from(gain + shift);
                        let off = (f64::from(*got) - expected).abs();
                        assert!(off <= 1e-6 * expected.abs(), "{width}: {got}, not {expected}");
                    }
                }
            }
        }
    }

    #[test]
    fn other_types_are_left_to_burn() {
        let device = Device::flex();
        let x = Tensor::<2>::ones([2, 4], &device);
        let gains = Tensor::<1>::ones([4], &device);
        assert!(normed(&x.clone().cast(DType::F16), &gains, 1e-5, 0.0).is_none());
        assert!(normed(&x, &gains.cast(DType::F16), 1e-5, 0.0).is_none());
    }
}
