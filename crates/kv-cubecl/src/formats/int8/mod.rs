//! Symmetric signed integers of 8 bits: `code * scale`, with codes from -127 to 127 and the scale
//! `f16(amax / 127)`.
//!
//! Codes are computed from the stored scale, rounding ties to even. The scale ignores NaN, and the
//! code of a NaN is 0. All codes of a group with scale 0 are 0. Scales are at most 65504; numbers
//! above 127 times that saturate.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use super::packed::CodecSpec;

/// The largest code.
const LARGEST: f32 = 127.0;

/// The codec of [this module](self).
#[derive(Debug)]
pub(crate) struct Int8;

impl Int8 {
    pub(super) const SPEC: CodecSpec = CodecSpec {
        parameter_bits: 16,
        largest: Some(&[LARGEST]),
        limit: f32::MAX,
        float: None,
        scales_by_norm: false,
        needs_hadamard: false,
    };
}
