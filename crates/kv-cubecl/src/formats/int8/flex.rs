//! Int8 on the CPU.

use super::{Int8, LARGEST};
use crate::formats::{
    PackedFormat,
    scaled::flex::{Scaled, half_scale, half_value},
};

impl Scaled for Int8 {
    const FORMAT: PackedFormat = PackedFormat::Int8;
    const LARGEST: Option<f32> = Some(LARGEST);

    fn parameter(amax: f32) -> u32 {
        half_scale(amax / LARGEST).to_bits().into()
    }

    #[inline(always)]
    fn scale(parameter: u32) -> f32 {
        half_value(parameter)
    }

    #[inline(always)]
    fn encode(steps: f32) -> u8 {
        // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits.
        (steps.clamp(-LARGEST, LARGEST) + 12_582_912.0).to_bits() as u8
    }

    #[inline(always)]
    fn value(code: u8) -> f32 {
        f32::from(code as i8)
    }

    fn half_step(_value: f32) -> f32 {
        0.5
    }
}
