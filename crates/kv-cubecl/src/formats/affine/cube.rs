//! Affine groups in kernels.

use cubecl::prelude::*;

use super::Affine;
use crate::formats::in_kernels::{
    CubeCodec, F16_MAX, half_bits, half_value, is_nan, round_half_even, saturate,
};

#[cube]
impl CubeCodec for Affine {
    fn parameter(min: f32, max: f32, #[comptime] n_bits: u32) -> u32 {
        let max_code = comptime!(((1u32 << n_bits) - 1) as f32);
        let none = min > max;
        let min = select(none, f32::new(0.0), min);
        let max = select(none, f32::new(0.0), max);
        half_bits((max - min) / max_code) | (half_bits(min) << 16u32)
    }

    fn scale(parameter: u32) -> f32 {
        half_value(parameter & 0xffffu32)
    }

    fn offset(parameter: u32) -> f32 {
        half_value(parameter >> 16u32)
    }

    fn encode(x: f32, scale: f32, offset: f32, #[comptime] n_bits: u32) -> u32 {
        let max_code = comptime!(((1u32 << n_bits) - 1) as f32);
        let mut code = 0u32;
        if scale > 0.0f32 && !is_nan(x) {
            let steps = clamp((saturate(x) - offset) / scale, 0.0f32, max_code);
            code = u32::cast_from(round_half_even(steps));
        }
        code
    }

    fn value(code: u32, #[comptime] _n_bits: u32) -> f32 {
        f32::cast_from(code)
    }

    fn add_scale_gradient(
        data: &[f32],
        grad: &mut [f32],
        base: usize,
        stride: usize,
        #[comptime] group_size: usize,
        #[comptime] n_bits: u32,
    ) {
        let max_code = comptime!(((1u32 << n_bits) - 1) as f32);
        let mut min = f32::new(F16_MAX);
        let mut max = f32::new(-F16_MAX);
        let mut lowest = base;
        let mut highest = base;
        for i in 0..group_size {
            let at = base + i * stride;
            let x = saturate(data[at]);
            if x < min {
                min = x;
                lowest = at;
            }
            if x > max {
                max = x;
                highest = at;
            }
        }
        let parameter = Self::parameter(min, max, n_bits);
        let scale = Self::scale(parameter);
        let min = Self::offset(parameter);
        if scale > 0.0f32 {
            let mut sum = f32::new(0.0);
            for i in 0..group_size {
                let at = base + i * stride;
                let code = f32::cast_from(Self::encode(data[at], scale, min, n_bits));
                let error = code - (saturate(data[at]) - min) / scale;
                // A NaN has no rounding error.
                if !is_nan(data[at]) {
                    sum += grad[at] * clamp(error, -0.5f32, 0.5f32);
                }
            }
            let sum = sum / max_code;
            grad[highest] += sum;
            grad[lowest] -= sum;
        }
    }
}
