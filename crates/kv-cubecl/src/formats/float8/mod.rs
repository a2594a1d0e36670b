//! Floats of 8 bits, E4M3 and E5M2 (Micikevicius et al., 2022, <https://arxiv.org/abs/2209.05433>), with a scale for
//! each token and head, `f16(amax / largest)`.
//!
//! Codes are those of `x / scale`, with the scale as it is stored, to the nearest number, ties to even; beyond the
//! largest they saturate. So there is no code of an infinity or NaN in a cache; a NaN counts for no scale and has code
//! 0. Encodings are worked out in integers, since WebGPU has no such type.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use super::{minifloat::Minifloat, packed::CodecSpec};

/// 4 bits of exponent and 3 of mantissa; no infinities, and NaN where all bits are set.
pub(super) const E4M3: Minifloat =
    Minifloat { bias: 7, mantissa: 3, largest: 448.0, sign: 0x80, first_special: 0x7f };

/// 5 bits of exponent and 2 of mantissa, as the upper byte of an f16.
pub(super) const E5M2: Minifloat =
    Minifloat { bias: 15, mantissa: 2, largest: 57344.0, sign: 0x80, first_special: 0x7c };

const fn spec(float: Minifloat) -> CodecSpec {
    CodecSpec {
        parameter_bits: 16,
        largest: Some(float.largest),
        limit: f32::MAX,
        float: Some(float),
    }
}

/// See [`E4M3`].
#[derive(Debug)]
pub(crate) struct E4m3;

/// See [`E5M2`].
#[derive(Debug)]
pub(crate) struct E5m2;

impl E4m3 {
    pub(super) const SPEC: CodecSpec = spec(E4M3);
}

impl E5m2 {
    pub(super) const SPEC: CodecSpec = spec(E5M2);
}
