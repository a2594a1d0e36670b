//! Signed integers of 8 bits, symmetric: `code * scale`, codes from -127 to 127, scale `f16(amax / 127)`.
//!
//! Codes are computed with the scale as it is stored, ties to even. A NaN counts for no scale and has code 0, and a
//! group whose scale is 0 has codes 0. Scales end at 65504, so that numbers beyond 127 times that saturate.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use super::packed::CodecSpec;

/// Largest code.
const LARGEST: f32 = 127.0;

/// See [the module](self).
#[derive(Debug)]
pub(crate) struct Int8;

impl Int8 {
    pub(super) const SPEC: CodecSpec =
        CodecSpec { parameter_bits: 16, largest: Some(LARGEST), limit: f32::MAX, float: None };
}
