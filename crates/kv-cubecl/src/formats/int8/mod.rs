//! Signed integers of 8 bits, symmetric: `code * scale`, codes from -127 to 127, scale `f16(amax / 127)`.
//!
//! Codes are computed with the scale as it is stored, ties to even. A NaN counts for no scale and has code 0, and a
//! group whose scale is 0 has codes 0. Scales end at 65504, so that numbers beyond 127 times that saturate.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use super::{
    Codec,
    packed::CodecSpec,
    side::{Groups, OfFrames, Stored},
};

pub(super) const ABOUT: CodecSpec =
    CodecSpec { parameter_bits: 16, largest: Some(LARGEST), limit: f32::MAX, float: None };

/// With a scale for each token and head.
pub(super) const STORED: Stored = stored("int8", Groups::Token);

/// With a scale for each of KIVI's groups: so many tokens of a channel for keys, so many channels of a token for values.
pub(super) const STORED_GROUPS: Stored = stored("int8g", Groups::Kivi);

/// With a scale for each head of a frame, taken from its largest magnitude and those of the frames before.
pub(super) const STORED_FRAMES: Stored = stored("int8f", Groups::Frame(OfFrames::Largest));

/// The same of a percentile of the magnitudes of a frame.
pub(super) const STORED_PERCENTILE: Stored = stored("int8p", Groups::Frame(OfFrames::Percentile));

const fn stored(name: &'static str, groups: Groups) -> Stored {
    Stored { name, format: Codec::Int8, n_bits: 8, groups }
}

/// Largest code.
const LARGEST: f32 = 127.0;

/// See [the module](self).
#[derive(Debug)]
pub(crate) struct Int8;
