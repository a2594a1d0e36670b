//! 8-bit floats in kernels.

use cubecl::prelude::*;

use super::{E4M3, E4m3, E5M2, E5m2};
use crate::formats::{
    in_kernels::{CubeCodec, half_value, is_nan},
    minifloat,
    scaled::cube::{ScaledInKernels, add_gradient, half_scale},
};

macro_rules! in_kernels {
    ($Format:ident, $FLOAT:ident) => {
        #[cube]
        impl CubeCodec for $Format {
            fn parameter(min: f32, max: f32, #[comptime] _n_bits: u32) -> u32 {
                half_scale(min, max, f32::new(comptime!($FLOAT.largest)))
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
                    code = minifloat::encode(x / scale, $FLOAT);
                }
                code
            }

            fn value(code: u32, #[comptime] _n_bits: u32) -> f32 {
                minifloat::value(code, $FLOAT)
            }

            fn add_scale_gradient(
                data: &[f32],
                grad: &mut [f32],
                base: usize,
                stride: usize,
                #[comptime] group_size: usize,
                #[comptime] n_bits: u32,
            ) {
                let most = f32::new(comptime!($FLOAT.largest));
                add_gradient::<$Format>(data, grad, base, stride, most, group_size, n_bits);
            }
        }

        #[cube]
        impl ScaledInKernels for $Format {
            fn half_step(value: f32) -> f32 {
                minifloat::half_step(value, $FLOAT)
            }
        }
    };
}

in_kernels!(E4m3, E4M3);
in_kernels!(E5m2, E5M2);
