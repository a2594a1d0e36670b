//! Affine codes, `code * scale + min`, with a scale and minimum per group in f16: KIVI's quantizer.

#[cfg(feature = "cube")]
pub(in crate::formats) mod cube;
#[cfg(feature = "flex")]
pub(in crate::formats) mod flex;

use super::packed::CodecSpec;

/// The codec of [this module](self).
#[derive(Debug)]
pub(crate) struct Affine;

impl Affine {
    pub(super) const SPEC: CodecSpec = CodecSpec {
        parameter_bits: 32,
        largest: None,
        limit: 65504.0,
        float: None,
        scales_by_norm: false,
        needs_hadamard: false,
    };
}
