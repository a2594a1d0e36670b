//! The codes of variance-normalized tiles in kernels. They are affine, and [`Affine`] computes
//! them; the kernels that read and write tiles apply their factors.

use cubecl::prelude::*;

use super::Normalized;
use crate::formats::{affine::Affine, in_kernels::CubeCodec};

#[cube]
impl CubeCodec for Normalized {
    fn parameter(min: f32, max: f32, #[comptime] n_bits: u32) -> u32 {
        Affine::parameter(min, max, n_bits)
    }

    fn scale(parameter: u32) -> f32 {
        Affine::scale(parameter)
    }

    fn offset(parameter: u32) -> f32 {
        Affine::offset(parameter)
    }

    fn encode(x: f32, scale: f32, offset: f32, #[comptime] n_bits: u32) -> u32 {
        Affine::encode(x, scale, offset, n_bits)
    }

    fn value(code: u32, #[comptime] n_bits: u32) -> f32 {
        Affine::value(code, n_bits)
    }

    fn add_scale_gradient(
        data: &[f32],
        grad: &mut [f32],
        base: usize,
        stride: usize,
        #[comptime] group_size: usize,
        #[comptime] n_bits: u32,
    ) {
        Affine::add_scale_gradient(data, grad, base, stride, group_size, n_bits);
    }
}
