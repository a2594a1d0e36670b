//! 4-bit and 8-bit floats in blocks of channels. The scale of a block is a power of two, stored in
//! a byte as its exponent plus 127 (E8M0).
//!
//! DeepSeek's blocks hold E4M3 or E2M1 floats. Their scale is the smallest at which no number
//! saturates, `2^ceil(log2(amax / largest))`, with amax at least 1e-4 for E4M3 and 6 x 2^-126 for
//! E2M1. OCP's MXFP4 (Open Compute Project, Microscaling Formats v1.0) holds E2M1 floats with the
//! scale `2^(floor(log2 amax) - 2)`, at which the largest numbers may saturate.
//!
//! Codes are rounded to the nearest number, ties to even. The scale ignores NaN, and the code of a
//! NaN is 0. Magnitudes above 2^127, also infinite ones, are clamped to it.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use super::{float8::E4M3, minifloat::Minifloat, packed::CodecSpec};

/// 2 bits of exponent and 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
const E2M1: Minifloat = Minifloat { bias: 1, mantissa: 1, largest: 6.0, sign: 8, first_special: 8 };

/// The rule for the scale of a block.
#[derive(Clone, Copy, Debug)]
struct Rule {
    float: Minifloat,
    /// The lower bound of amax.
    floor: f32,
    /// The exponent of the largest number.
    exponent: i32,
    /// The f32 mantissa of amax above which the scale is twice as large.
    most: u32,
}

/// The mask of the mantissa of an f32.
const MANTISSA: u32 = 0x7f_ffff;

impl Rule {
    const E4M3: Self = Self { float: E4M3, floor: 1e-4, exponent: 8, most: E4M3_MOST };
    const E2M1: Self = Self { float: E2M1, floor: 6.0 * SMALLEST, exponent: 2, most: E2M1_MOST };
    /// Ignores the mantissa: no mantissa is above `most`.
    const MXFP4: Self = Self { float: E2M1, floor: 0.0, exponent: 2, most: MANTISSA };
}

const SMALLEST: f32 = f32::MIN_POSITIVE;
const E4M3_MOST: u32 = E4M3.largest.to_bits() & MANTISSA;
const E2M1_MOST: u32 = E2M1.largest.to_bits() & MANTISSA;

/// 2^127, whose restored number is finite.
const LIMIT: f32 = f32::from_bits(0x7f00_0000);

const fn spec(float: Minifloat, largest: &'static [f32]) -> CodecSpec {
    CodecSpec {
        parameter_bits: 8,
        largest: Some(largest),
        limit: LIMIT,
        float: Some(float),
        scales_by_norm: false,
        needs_hadamard: false,
    }
}

/// The codec of DeepSeek's blocks of E4M3 floats.
#[derive(Debug)]
pub(crate) struct E4m3Blocks;

/// The codec of DeepSeek's blocks of E2M1 floats.
#[derive(Debug)]
pub(crate) struct E2m1Blocks;

/// The codec of OCP's blocks of E2M1 floats.
#[derive(Debug)]
pub(crate) struct Mxfp4;

impl E4m3Blocks {
    pub(super) const SPEC: CodecSpec = spec(E4M3, &[E4M3.largest]);
}

impl E2m1Blocks {
    pub(super) const SPEC: CodecSpec = spec(E2M1, &[E2M1.largest]);
}

impl Mxfp4 {
    pub(super) const SPEC: CodecSpec = spec(E2M1, &[E2M1.largest]);
}
