//! The formats of packed weights, a folder each: what a block holds, and how the CPU and kernels unpack it.

mod bf16;
#[cfg(feature = "cube")]
pub(crate) mod cube;
mod f16;
mod grouped;
mod mxfp4;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
pub(crate) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
pub(crate) mod vnni;
#[cfg(all(feature = "flex", any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) mod wide;

use core::{fmt, str::FromStr};

pub use grouped::GroupSize;

use crate::{Error, error::invalid};

/// How the numbers of a matrix are packed: in blocks of codes with their scales, or in 16 bits.
///
/// Those of GGML lie bit for bit as in GGUF files
/// (<https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h>).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WeightFormat {
    /// 32 codes of 4 bits: `scale * (code - 8)`; 4.5 bits a number.
    Q4_0,
    /// 32 codes of 4 bits: `scale * code + min`; 5 bits a number.
    Q4_1,
    /// 32 codes of 5 bits: `scale * (code - 16)`; 5.5 bits a number.
    Q5_0,
    /// 32 codes of 5 bits: `scale * code + min`; 6 bits a number.
    Q5_1,
    /// 32 signed bytes: `scale * code`; 8.5 bits a number.
    Q8_0,
    /// 256 codes of 4 bits, in groups of 32 with a scale and a minimum of 6 bits; 4.5 bits a number.
    Q4K,
    /// 256 codes of 5 bits, in groups of 32 with a scale and a minimum of 6 bits; 5.5 bits a number.
    Q5K,
    /// 256 codes of 6 bits, in groups of 16 with a scale of 8 bits; 6.5625 bits a number.
    Q6K,
    /// 32 numbers of 4 bits (E2M1) with a power of two, as the Open Compute Project's "Microscaling Formats" have
    /// them, in GGUF's order; 4.25 bits a number.
    Mxfp4,
    /// Codes of 4 bits in groups: `scale * (code - zero)`, with both for each group; 5, 4.5 or 4.25 bits a number.
    Int4(GroupSize),
    /// Codes of 8 bits in groups: `scale * (code - zero)`, with both for each group; 9, 8.5 or 8.25 bits a number.
    Int8(GroupSize),
    /// Numbers of 16 bits (IEEE 754), 32 of which are called a block. Each is what it is in f32: subnormal numbers,
    /// infinities and both zeros too, and one that is no number stays none.
    F16,
    /// The upper 16 bits of numbers in f32, 32 of which are called a block. What is subnormal is subnormal in f32 too,
    /// which a GPU may take for 0; infinities and what is no number stay so.
    Bf16,
}

/// Where the numbers of a block of 32 are that are f16.
const HALF_OFFSETS: [usize; 32] = {
    let mut offsets = [0; 32];
    let mut i = 0;
    while i < 32 {
        offsets[i] = 2 * i;
        i += 1;
    }
    offsets
};

/// What is known of a format without its blocks.
pub(crate) struct Spec {
    name: &'static str,
    /// Numbers of a block.
    numbers: usize,
    /// Bytes of a block.
    bytes: usize,
    /// GGML's number of the type.
    ggml: Option<u32>,
    /// The bytes of a block at which f16 numbers begin.
    halves: &'static [usize],
    /// The byte of a block that is the exponent of a power of two, 127 above it.
    exponent: Option<usize>,
}

impl WeightFormat {
    /// All formats.
    pub const ALL: &[Self] = &[
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Mxfp4,
        Self::Int4(GroupSize::G32),
        Self::Int4(GroupSize::G64),
        Self::Int4(GroupSize::G128),
        Self::Int8(GroupSize::G32),
        Self::Int8(GroupSize::G64),
        Self::Int8(GroupSize::G128),
        Self::F16,
        Self::Bf16,
    ];

    const fn spec(self) -> &'static Spec {
        match self {
            Self::Q4_0 => &q4_0::SPEC,
            Self::Q4_1 => &q4_1::SPEC,
            Self::Q5_0 => &q5_0::SPEC,
            Self::Q5_1 => &q5_1::SPEC,
            Self::Q8_0 => &q8_0::SPEC,
            Self::Q4K => &q4_k::SPEC,
            Self::Q5K => &q5_k::SPEC,
            Self::Q6K => &q6_k::SPEC,
            Self::Mxfp4 => &mxfp4::SPEC,
            Self::Int4(group) => grouped::int4(group),
            Self::Int8(group) => grouped::int8(group),
            Self::F16 => &f16::SPEC,
            Self::Bf16 => &bf16::SPEC,
        }
    }

    /// The name for users to read and write, such as `q4_1`.
    pub const fn name(self) -> &'static str {
        self.spec().name
    }

    /// Numbers of a block.
    pub const fn block_numbers(self) -> usize {
        self.spec().numbers
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        self.spec().bytes
    }

    /// Returns the numbers of `blocks` in f32, in their order. An incomplete last block is ignored.
    pub fn restore(self, blocks: &[u8]) -> Vec<f32> {
        let n = blocks.len() / self.block_bytes();
        let mut numbers = vec![0.0; n * self.block_numbers()];
        unpack::restore(self, &blocks[..n * self.block_bytes()], &mut numbers);
        numbers
    }

    /// The first of these blocks whose numbers are not all finite in f32.
    pub(crate) fn not_finite(self, blocks: &[u8]) -> Option<usize> {
        let &Spec { bytes, halves, exponent, .. } = self.spec();
        blocks.chunks_exact(bytes).position(|block| {
            // An f16 with all bits of its exponent set is infinite or no number.
            halves.iter().fold(false, |any, at| any | (block[at + 1] & 0x7c == 0x7c))
                // The largest code is 6, so that two more exponents overflow than the one that means no number.
                || exponent.is_some_and(|at| block[at] > 252)
                || self == Self::Bf16 && !bf16::finite(block)
        })
    }

    /// Whether numbers lie there as they are, in 16 bits, rather than as codes.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16)
    }

    /// GGML's number of the type, which GGUF files have; `None` for a format that is not GGML's.
    pub const fn ggml_type(self) -> Option<u32> {
        self.spec().ggml
    }

    /// The format of GGML's type of this number, if it is one of these.
    pub fn from_ggml_type(number: u32) -> Option<Self> {
        Self::ALL.iter().copied().find(|format| format.ggml_type() == Some(number))
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for WeightFormat {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.iter().copied().find(|format| format.name() == text).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|format| format.name()).collect();
            invalid(
                "weight format",
                format!("{text:?}"),
                format!("must be one of {}", names.join(", ")),
            )
        })
    }
}
