//! Codes on a line, `code * scale + min`, with scale and minimum of a group in f16: the quantizer of KIVI.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use super::{
    Codec,
    packed::CodecSpec,
    side::{Groups, Stored},
};

pub(super) const ABOUT: CodecSpec =
    CodecSpec { parameter_bits: 32, largest: None, limit: 65504.0, float: None };

/// With 2, 4 and 8 bits.
pub(super) const STORED: [Stored; 3] = [stored("2", 2), stored("4", 4), stored("8", 8)];

const fn stored(name: &'static str, n_bits: u32) -> Stored {
    Stored { name, format: Codec::Affine, n_bits, groups: Groups::Kivi }
}

/// See [the module](self).
#[derive(Debug)]
pub(crate) struct Affine;
