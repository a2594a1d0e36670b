//! Floats of few bits in blocks of 32 channels, whose scale is a power of two, stored as its exponent and 127 in a
//! byte (E8M0).
//!
//! DeepSeek's blocks, of E4M3 or E2M1, have the smallest scale by which no number is beyond the largest,
//! `2^ceil(log2(amax / largest))`, with amax at least 1e-4, or 6 x 2^-126. Those of OCP's MXFP4 (Open Compute Project,
//! Microscaling Formats v1.0) have E2M1 and `2^(floor(log2 amax) - 2)`, beyond which numbers saturate. Codes are to the
//! nearest number, ties to even. A NaN counts for no scale and has code 0, and what is beyond 2^127, infinities too,
//! counts as that.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use super::{float8::E4M3, minifloat::Minifloat, packed::CodecSpec};

/// 2 bits of exponent and 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
const E2M1: Minifloat = Minifloat { bias: 1, mantissa: 1, largest: 6.0, sign: 8, first_special: 8 };

/// How the scale of a block is found.
#[derive(Clone, Copy, Debug)]
struct Rule {
    float: Minifloat,
    /// The least amax that counts.
    floor: f32,
    /// The exponent of the largest number.
    exponent: i32,
    /// The mantissa, as f32 has it, beyond which amax takes a scale twice as large.
    most: u32,
}

const MANTISSA: u32 = 0x7f_ffff;

impl Rule {
    const E4M3: Self = Self { float: E4M3, floor: 1e-4, exponent: 8, most: E4M3_MOST };
    const E2M1: Self = Self { float: E2M1, floor: 6.0 * SMALLEST, exponent: 2, most: E2M1_MOST };
    /// The power of two below, whatever the mantissa.
    const MXFP4: Self = Self { float: E2M1, floor: 0.0, exponent: 2, most: MANTISSA };
}

const SMALLEST: f32 = f32::MIN_POSITIVE;
const E4M3_MOST: u32 = E4M3.largest.to_bits() & MANTISSA;
const E2M1_MOST: u32 = E2M1.largest.to_bits() & MANTISSA;

/// 2^127: what it is restored to is finite.
const LIMIT: f32 = f32::from_bits(0x7f00_0000);

const fn spec(float: Minifloat) -> CodecSpec {
    CodecSpec { parameter_bits: 8, largest: Some(float.largest), limit: LIMIT, float: Some(float) }
}

/// DeepSeek's blocks of E4M3.
#[derive(Debug)]
pub(crate) struct E4m3Blocks;

/// DeepSeek's blocks of E2M1.
#[derive(Debug)]
pub(crate) struct E2m1Blocks;

/// OCP's blocks of E2M1.
#[derive(Debug)]
pub(crate) struct Mxfp4;

impl E4m3Blocks {
    pub(super) const SPEC: CodecSpec = spec(E4M3);
}

impl E2m1Blocks {
    pub(super) const SPEC: CodecSpec = spec(E2M1);
}

impl Mxfp4 {
    pub(super) const SPEC: CodecSpec = spec(E2M1);
}
