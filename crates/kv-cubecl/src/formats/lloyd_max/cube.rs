//! Lloyd-Max codes in kernels.

use cubecl::prelude::*;

use super::{LloydMax, edge, level};
use crate::formats::in_kernels::{
    CubeCodec, F16_MAX, half_bits, half_value, is_nan, saturate, square,
};

#[cube]
impl CubeCodec for LloydMax {
    fn parameter(_min: f32, max: f32, #[comptime] _n_bits: u32) -> u32 {
        half_bits(clamp_max(max, f32::new(F16_MAX)))
    }

    fn scale(parameter: u32) -> f32 {
        half_value(parameter)
    }

    fn offset(_parameter: u32) -> f32 {
        f32::new(0.0)
    }

    fn encode(x: f32, scale: f32, _offset: f32, #[comptime] n_bits: u32) -> u32 {
        let mut steps = f32::new(0.0);
        if scale > 0.0f32 && !is_nan(x) {
            steps = saturate(x) / scale;
        }
        let mut code = 0u32;
        #[unroll]
        for above in 1..comptime!(1usize << n_bits) {
            code += select(steps > comptime!(edge(above, n_bits)), 1u32, 0u32);
        }
        code
    }

    fn value(code: u32, #[comptime] n_bits: u32) -> f32 {
        let half = comptime!(1u32 << (n_bits - 1));
        let positive = code >= half;
        let index = select(positive, code - half, half - 1u32 - code);
        let mut value = f32::new(comptime!(level(1 << (n_bits - 1), n_bits)));
        #[unroll]
        for nth in 1..comptime!(1usize << (n_bits - 1)) {
            let next = f32::new(comptime!(level((1 << (n_bits - 1)) + nth, n_bits)));
            value = select(index >= nth as u32, next, value);
        }
        select(positive, value, -value)
    }

    fn add_scale_gradient(
        data: &[f32],
        grad: &mut [f32],
        base: usize,
        stride: usize,
        #[comptime] group_size: usize,
        #[comptime] n_bits: u32,
    ) {
        let mut squares = f32::new(0.0);
        for i in 0..group_size {
            squares += square(saturate(data[base + i * stride]));
        }
        let n = comptime!(group_size as f32);
        let rms = (squares / n).sqrt();
        let mut of_levels = f32::new(0.0);
        for i in 0..group_size {
            let code = Self::encode(data[base + i * stride], rms, f32::new(0.0), n_bits);
            of_levels += square(Self::value(code, n_bits));
        }
        if squares > 0.0f32 {
            let scale = rms / (of_levels / n).sqrt();
            let scale = Self::scale(Self::parameter(-scale, scale, n_bits));
            let mut of_errors = f32::new(0.0);
            for i in 0..group_size {
                let at = base + i * stride;
                let code = Self::encode(data[at], rms, f32::new(0.0), n_bits);
                of_errors += grad[at] * (Self::value(code, n_bits) * scale - number(data[at]));
            }
            let rate = of_errors / squares;
            for i in 0..group_size {
                let at = base + i * stride;
                grad[at] += rate * number(data[at]);
            }
        }
    }
}

/// Returns a number as it is quantized.
#[cube]
fn number(x: f32) -> f32 {
    select(is_nan(x), f32::new(0.0), saturate(x))
}
