//! A word with the scale (f16) and the code of 0 (16 bits), then codes of 4 or 8 bits. Codes of 4 bits lie 32 at a time,
//! those of the first half in the lower halves of 16 bytes.

#[cfg(feature = "cube")]
pub(super) mod cube;
pub(super) mod unpack;
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

const fn spec(name: &'static str, bits: usize, numbers: usize) -> Spec {
    let bytes = HEADER + bits * numbers / 8;
    Spec { name, numbers, bytes, ggml: None, halves: &[0], exponent: None }
}

pub(super) const fn int4(group: GroupSize) -> &'static Spec {
    match group {
        GroupSize::G32 => const { &spec("int4-g32", 4, 32) },
        GroupSize::G64 => const { &spec("int4-g64", 4, 64) },
        GroupSize::G128 => const { &spec("int4-g128", 4, 128) },
    }
}

pub(super) const fn int8(group: GroupSize) -> &'static Spec {
    match group {
        GroupSize::G32 => const { &spec("int8-g32", 8, 32) },
        GroupSize::G64 => const { &spec("int8-g64", 8, 64) },
        GroupSize::G128 => const { &spec("int8-g128", 8, 128) },
    }
}
