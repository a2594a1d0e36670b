//! Groups of codes of 4 or 8 bits with a scale and a zero code.
//!
//! A group is a word with the scale (f16) and the zero code (16 bits), then the codes. Codes of 4
//! bits are packed 32 at a time: the first half in the lower halves of 16 bytes, the second half in
//! the upper halves.

#[cfg(feature = "cube")]
pub(crate) mod cube;
pub(crate) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod vnni;

use super::Spec;

/// Number of weights that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GroupSize {
    /// 32 weights.
    G32,
    /// 64 weights.
    G64,
    /// 128 weights.
    G128,
}

impl GroupSize {
    /// Returns the number of weights.
    pub const fn numbers(self) -> usize {
        match self {
            Self::G32 => 32,
            Self::G64 => 64,
            Self::G128 => 128,
        }
    }
}

/// Bytes of the scale and the zero code.
pub(crate) const HEADER: usize = 4;

const fn spec(bits: usize, numbers: usize) -> Spec {
    let bytes = HEADER + bits * numbers / 8;
    Spec { numbers, bytes, halves: &[0], exponent: None }
}
