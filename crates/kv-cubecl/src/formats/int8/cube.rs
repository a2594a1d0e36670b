//! Int8 in kernels.

use cubecl::prelude::*;

use super::{Int8, LARGEST};
use crate::formats::{
    in_kernels::{CubeCodec, half_value, is_nan, round_half_even},
    scaled::cube::{ScaledInKernels, add_gradient, half_scale},
};

#[cube]
impl CubeCodec for Int8 {
    fn parameter(min: f32, max: f32, #[comptime] _n_bits: u32) -> u32 {
        half_scale(min, max, f32::new(LARGEST))
    }

    fn scale(parameter: u32) -> f32 {
        half_value(parameter)
    }

    fn offset(_parameter: u32) -> f32 {
        f32::new(0.0)
    }

    fn encode(x: f32, scale: f32, _offset: f32, #[comptime] _n_bits: u32) -> u32 {
        let mut code = 0u32;
        if scale > 0.0f32 && !is_nan(x) {
            let steps = clamp_max((x / scale).abs(), f32::new(LARGEST));
            code = u32::cast_from(round_half_even(steps));
            if x < 0.0f32 {
                // Two's complement in 8 bits.
                code = (256u32 - code) & 255u32;
            }
        }
        code
    }

    fn value(code: u32, #[comptime] _n_bits: u32) -> f32 {
        f32::cast_from(code ^ 128u32) - 128.0f32
    }

    fn add_scale_gradient(
        data: &[f32],
        grad: &mut [f32],
        base: usize,
        stride: usize,
        #[comptime] group_size: usize,
        #[comptime] n_bits: u32,
    ) {
        add_gradient::<Int8>(data, grad, base, stride, f32::new(LARGEST), group_size, n_bits);
    }
}

#[cube]
impl ScaledInKernels for Int8 {
    fn half_step(_value: f32) -> f32 {
        f32::new(0.5)
    }
}
