//! A word with the scale (f16) and the code of 0 (16 bits), then codes of 4 or 8 bits. Codes of 4 bits lie 32 at a time,
//! those of the first half in the lower halves of 16 bytes.

#[cfg(feature = "cube")]
pub(crate) mod cube;
pub(crate) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod vnni;

use super::Spec;

/// Numbers that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GroupSize {
    /// 32 numbers.
    G32,
    /// 64 numbers.
    G64,
    /// 128 numbers.
    G128,
}

impl GroupSize {
    /// How many numbers.
    pub const fn numbers(self) -> usize {
        match self {
            Self::G32 => 32,
            Self::G64 => 64,
            Self::G128 => 128,
        }
    }
}

/// Bytes of scale and code of 0.
pub(crate) const HEADER: usize = 4;

const fn spec(bits: usize, numbers: usize) -> Spec {
    let bytes = HEADER + bits * numbers / 8;
    Spec { numbers, bytes, halves: &[0], exponent: None }
}
