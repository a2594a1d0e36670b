//! Codes on a line, `code * scale + min`, with scale and minimum of a group in f16: the quantizer of KIVI.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use super::packed::CodecSpec;

/// See [the module](self).
#[derive(Debug)]
pub(crate) struct Affine;

impl Affine {
    pub(super) const SPEC: CodecSpec =
        CodecSpec { parameter_bits: 32, largest: None, limit: 65504.0, float: None };
}
