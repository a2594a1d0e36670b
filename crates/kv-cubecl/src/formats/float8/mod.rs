//! 8-bit floats, E4M3 and E5M2 (Micikevicius et al., 2022,
//! <https://arxiv.org/abs/2209.05433>), with the scale `f16(amax / largest)` per token and head.
//!
//! Codes are rounded from `x / scale` with the stored scale, ties to even. Larger numbers saturate,
//! so a cache never holds the code of an infinity or NaN. The scale ignores NaN, and the code of a
//! NaN is 0. Kernels encode with integers, as WebGPU has no such type.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use super::{minifloat::Minifloat, packed::CodecSpec};

/// 4 bits of exponent and 3 of mantissa, without infinities. NaN has all bits set.
pub(super) const E4M3: Minifloat =
    Minifloat { bias: 7, mantissa: 3, largest: 448.0, sign: 0x80, first_special: 0x7f };

/// 5 bits of exponent and 2 of mantissa: the upper byte of an f16.
pub(super) const E5M2: Minifloat =
    Minifloat { bias: 15, mantissa: 2, largest: 57344.0, sign: 0x80, first_special: 0x7c };

const fn spec(float: Minifloat, largest: &'static [f32]) -> CodecSpec {
    CodecSpec {
        parameter_bits: 16,
        largest: Some(largest),
        limit: f32::MAX,
        float: Some(float),
        scales_by_norm: false,
        needs_hadamard: false,
    }
}

/// The codec of [`E4M3`] floats.
#[derive(Debug)]
pub(crate) struct E4m3;

/// The codec of [`E5M2`] floats.
#[derive(Debug)]
pub(crate) struct E5m2;

impl E4m3 {
    pub(super) const SPEC: CodecSpec = spec(E4M3, &[E4M3.largest]);
}

impl E5m2 {
    pub(super) const SPEC: CodecSpec = spec(E5M2, &[E5M2.largest]);
}
