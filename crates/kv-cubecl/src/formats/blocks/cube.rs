//! Blocks in kernels.

use cubecl::prelude::*;

use super::{E2m1Blocks, E4m3Blocks, MANTISSA, Mxfp4, Rule};
use crate::formats::{
    in_kernels::{CubeCodec, is_nan},
    minifloat,
    scaled::cube::largest,
};

/// Returns the exponent of a block's scale, plus 127.
#[cube]
fn exponent(min: f32, max: f32, #[comptime] rule: Rule) -> u32 {
    let amax = clamp_min(largest(min, max), f32::new(comptime!(rule.floor)));
    let bits = u32::reinterpret(amax);
    let mut exponent = bits >> 23u32;
    if (bits & MANTISSA) > comptime!(rule.most) {
        exponent += 1u32;
    }
    let least = comptime!(rule.exponent as u32);
    clamp_min(exponent, least) - least
}

/// Returns the power of two in a parameter.
#[cube]
fn power(parameter: u32) -> f32 {
    // The power 2^-127 is subnormal.
    f32::reinterpret(select(parameter == 0u32, 1u32 << 22u32, parameter << 23u32))
}

macro_rules! in_kernels {
    ($Format:ident, $RULE:ident) => {
        #[cube]
        impl CubeCodec for $Format {
            fn parameter(min: f32, max: f32, #[comptime] _n_bits: u32) -> u32 {
                exponent(min, max, Rule::$RULE)
            }

            fn scale(parameter: u32) -> f32 {
                power(parameter)
            }

            fn offset(_parameter: u32) -> f32 {
                f32::new(0.0)
            }

            fn encode(x: f32, scale: f32, _offset: f32, #[comptime] _n_bits: u32) -> u32 {
                let mut code = 0u32;
                if !is_nan(x) {
                    code = minifloat::encode(x / scale, comptime!(Rule::$RULE.float));
                }
                code
            }

            fn value(code: u32, #[comptime] _n_bits: u32) -> f32 {
                minifloat::value(code, comptime!(Rule::$RULE.float))
            }

            // A power of two is a step function of the block, so its gradient is 0.
            fn add_scale_gradient(
                _data: &[f32],
                _grad: &mut [f32],
                _base: usize,
                _stride: usize,
                #[comptime] _group_size: usize,
                #[comptime] _n_bits: u32,
            ) {
            }
        }
    };
}

in_kernels!(E4m3Blocks, E4M3);
in_kernels!(E2m1Blocks, E2M1);
in_kernels!(Mxfp4, MXFP4);
