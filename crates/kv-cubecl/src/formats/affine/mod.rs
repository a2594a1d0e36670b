//! Codes on a line, `code * scale + min`, with scale and minimum of a group in f16: the quantizer of KIVI.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;

/// See [the module](self).
#[derive(Debug)]
pub(crate) struct Affine;
