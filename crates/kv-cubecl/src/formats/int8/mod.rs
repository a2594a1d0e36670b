//! Signed integers of 8 bits, symmetric: `code * scale`, codes from -127 to 127, scale `f16(amax / 127)`.
//!
//! Codes are computed with the scale as it is stored, ties to even. A NaN counts for no scale and has code 0, and a
//! group whose scale is 0 has codes 0. Scales end at 65504, so that numbers beyond 127 times that saturate.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use super::{
    PackedFormat,
    packed::PackedAbout,
    side::{Groups, Stored},
};

pub(super) const ABOUT: PackedAbout =
    PackedAbout { parameter_bits: 16, largest: Some(LARGEST), limit: f32::MAX, float: None };

/// With a scale for each token and head.
pub(super) const STORED: Stored =
    Stored { name: "int8", format: PackedFormat::Int8, n_bits: 8, groups: Groups::Token };

/// Largest code.
const LARGEST: f32 = 127.0;

/// See [the module](self).
#[derive(Debug)]
pub(crate) struct Int8;
