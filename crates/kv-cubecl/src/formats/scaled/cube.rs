//! Scaled groups in kernels.

use cubecl::prelude::*;

use crate::formats::in_kernels::{CubeCodec, F16_MAX, half_bits, is_nan};

/// Returns the largest magnitude of a group with these extremes; 0 if all elements are NaN.
#[cube]
pub(crate) fn largest(min: f32, max: f32) -> f32 {
    // Either zero may be the larger one, so `abs` removes its sign.
    select(min > max, f32::new(0.0), clamp_min(max, -min).abs())
}

/// Returns the bits of the f16 scale that maps the largest magnitude of a group to `most`, at most
/// the largest f16.
#[cube]
pub(crate) fn half_scale(min: f32, max: f32, most: f32) -> u32 {
    half_bits(clamp_max(largest(min, max) / most, f32::new(F16_MAX)))
}

/// A [`CubeCodec`] whose gradient is [`add_gradient`].
#[cube]
pub(crate) trait ScaledInKernels: CubeCodec {
    /// Returns how far a number may be from the `value` it is rounded to.
    fn half_step(value: f32) -> f32;
}

/// Computes [`CubeCodec::add_scale_gradient`] for the scale `largest magnitude / most`.
#[cube]
pub(crate) fn add_gradient<F: ScaledInKernels>(
    data: &[f32],
    grad: &mut [f32],
    base: usize,
    stride: usize,
    most: f32,
    #[comptime] group_size: usize,
    #[comptime] n_bits: u32,
) {
    let mut amax = f32::new(0.0);
    let mut largest = base;
    for i in 0..group_size {
        let at = base + i * stride;
        let x = data[at].abs();
        if x > amax {
            amax = x;
            largest = at;
        }
    }
    let amax = clamp_max(amax, f32::new(f32::MAX));
    let scale = F::scale(F::parameter(-amax, amax, n_bits));
    if scale > 0.0f32 && amax > 0.0f32 {
        let mut sum = f32::new(0.0);
        for i in 0..group_size {
            let at = base + i * stride;
            let x = data[at];
            // A NaN has no rounding error.
            if !is_nan(x) {
                let value = F::value(F::encode(x, scale, f32::new(0.0), n_bits), n_bits);
                let limit = F::half_step(value);
                sum += grad[at] * clamp(value - x / scale, -limit, limit);
            }
        }
        let sum = sum / most;
        grad[largest] += select(data[largest] < 0.0f32, -sum, sum);
    }
}
