//! The formats of packed weights.
//!
//! Each kind of block has a folder with its layout and how the CPU and kernels unpack it. One table
//! lists all formats.

pub(crate) mod affine;
pub(crate) mod affine_k;
#[cfg(feature = "cube")]
pub(crate) mod cube;
pub(crate) mod floats;
pub(crate) mod grouped;
pub(crate) mod mxfp4;
pub(crate) mod q6_k;
pub(crate) mod scaled;
pub(crate) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
pub(crate) mod vnni;
#[cfg(all(feature = "flex", any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) mod wide;

use core::{fmt, str::FromStr};

pub use grouped::GroupSize;

use crate::{Error, error::invalid};

/// Properties of a format.
pub(crate) struct Spec {
    /// Numbers in a block.
    numbers: usize,
    /// Bytes in a block.
    bytes: usize,
    /// Byte offsets of the f16 numbers of a block.
    halves: &'static [usize],
    /// Byte offset of the exponent of a power of two, with a bias of 127.
    exponent: Option<usize>,
}

/// Defines [`WeightFormat`] and the dispatch on it from a table of its variants.
///
/// A row is `Variant = "name" (GGML type), folder::Type;`. `Type` is in `folder/unpack.rs`, where
/// it implements [`Blocks`](unpack::Blocks), and in `folder/cube.rs`. The table has three parts:
/// `codes`, `grouped` (rows with a name for each [`GroupSize`]) and `floats`, whose types implement
/// [`Wide`](unpack::Wide) instead. The first token is a dollar sign for the macros defined inside.
macro_rules! formats {
    (
        $d:tt
        codes { $(
            $(#[$code_doc:meta])+
            $code:ident = $code_name:literal ($code_ggml:literal),
                $code_folder:ident::$code_type:ident $(<$code_bits:literal>)?;
        )+ }
        grouped { $(
            $(#[$group_doc:meta])+
            $group:ident = $g32:literal, $g64:literal, $g128:literal,
                $group_folder:ident::$group_type:ident;
        )+ }
        floats { $(
            $(#[$float_doc:meta])+
            $float:ident = $float_name:literal ($float_ggml:literal),
                $float_folder:ident::$float_type:ident;
        )+ }
    ) => {
        /// A format of packed numbers: blocks of codes with their scales, or 16-bit floats.
        ///
        /// GGML's formats have the same bytes as in GGUF files:
        /// <https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h>.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum WeightFormat {
            $($(#[$code_doc])+ $code,)+
            $($(#[$group_doc])+ $group(GroupSize),)+
            $($(#[$float_doc])+ $float,)+
        }

        impl WeightFormat {
            /// All formats.
            pub const ALL: &[Self] = &[
                $(Self::$code,)+
                $(
                    Self::$group(GroupSize::G32),
                    Self::$group(GroupSize::G64),
                    Self::$group(GroupSize::G128),
                )+
                $(Self::$float,)+
            ];

            const fn spec(self) -> &'static Spec {
                match self {
                    $(Self::$code => const {
                        &$code_folder::unpack::$code_type$(::<$code_bits>)?::SPEC
                    },)+
                    $(
                        Self::$group(GroupSize::G32) => const {
                            &$group_folder::unpack::$group_type::<32>::SPEC
                        },
                        Self::$group(GroupSize::G64) => const {
                            &$group_folder::unpack::$group_type::<64>::SPEC
                        },
                        Self::$group(GroupSize::G128) => const {
                            &$group_folder::unpack::$group_type::<128>::SPEC
                        },
                    )+
                    $(Self::$float => const { &$float_folder::unpack::$float_type::SPEC },)+
                }
            }

            /// Returns the name for users to read and write, such as `q4_1`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$code => $code_name,)+
                    $(
                        Self::$group(GroupSize::G32) => $g32,
                        Self::$group(GroupSize::G64) => $g64,
                        Self::$group(GroupSize::G128) => $g128,
                    )+
                    $(Self::$float => $float_name,)+
                }
            }

            /// Returns GGML's number of the type in GGUF files, or `None` for a format that is not
            /// GGML's.
            pub const fn ggml_type(self) -> Option<u32> {
                match self {
                    $(Self::$code => Some($code_ggml),)+
                    $(Self::$group(_) => None,)+
                    $(Self::$float => Some($float_ggml),)+
                }
            }

            /// Returns whether numbers are stored in 16 bits each, rather than as codes.
            pub const fn is_float(self) -> bool {
                matches!(self, $(Self::$float)|+)
            }
        }

        /// Calls `$body` with `$F` the [`Blocks`](unpack::Blocks) of a [`WeightFormat`], or
        /// `$other` with `$W` its [`Wide`](unpack::Wide).
        macro_rules! with_blocks {
            ($d format:expr, $d F:ident => $d body:expr, wide $d W:ident => $d other:expr) => {
                match $d format {
                    $($crate::formats::WeightFormat::$code => {
                        type $d F =
                            $crate::formats::$code_folder::unpack::$code_type $(<$code_bits>)?;
                        $d body
                    })+
                    $(
                        $crate::formats::WeightFormat::$group($crate::formats::GroupSize::G32) => {
                            type $d F = $crate::formats::$group_folder::unpack::$group_type<32>;
                            $d body
                        }
                        $crate::formats::WeightFormat::$group($crate::formats::GroupSize::G64) => {
                            type $d F = $crate::formats::$group_folder::unpack::$group_type<64>;
                            $d body
                        }
                        $crate::formats::WeightFormat::$group($crate::formats::GroupSize::G128) => {
                            type $d F = $crate::formats::$group_folder::unpack::$group_type<128>;
                            $d body
                        }
                    )+
                    $($crate::formats::WeightFormat::$float => {
                        #[allow(dead_code, reason = "some callers only need the other type")]
                        type $d W = $crate::formats::$float_folder::unpack::$float_type;
                        $d other
                    })+
                }
            };
        }

        /// Calls `$body` with `$F` the [`BlocksInKernels`](cube::BlocksInKernels) of a
        /// [`WeightFormat`].
        #[cfg(feature = "cube")]
        macro_rules! with_kernels {
            ($d format:expr, $d F:ident => $d body:expr) => {
                match $d format {
                    $($crate::formats::WeightFormat::$code => {
                        type $d F =
                            $crate::formats::$code_folder::cube::$code_type $(<$code_bits>)?;
                        $d body
                    })+
                    $(
                        $crate::formats::WeightFormat::$group($crate::formats::GroupSize::G32) => {
                            type $d F = $crate::formats::$group_folder::cube::$group_type<32>;
                            $d body
                        }
                        $crate::formats::WeightFormat::$group($crate::formats::GroupSize::G64) => {
                            type $d F = $crate::formats::$group_folder::cube::$group_type<64>;
                            $d body
                        }
                        $crate::formats::WeightFormat::$group($crate::formats::GroupSize::G128) => {
                            type $d F = $crate::formats::$group_folder::cube::$group_type<128>;
                            $d body
                        }
                    )+
                    $($crate::formats::WeightFormat::$float => {
                        type $d F = $crate::formats::$float_folder::cube::$float_type;
                        $d body
                    })+
                }
            };
        }
    };
}

formats! {
    $
    codes {
        /// 32 codes of 4 bits: `scale * (code - 8)`; 4.5 bits per number.
        Q4_0 = "q4_0" (2), scaled::Scaled<4>;
        /// 32 codes of 4 bits: `scale * code + min`; 5 bits per number.
        Q4_1 = "q4_1" (3), affine::Affine<4>;
        /// 32 codes of 5 bits: `scale * (code - 16)`; 5.5 bits per number.
        Q5_0 = "q5_0" (6), scaled::Scaled<5>;
        /// 32 codes of 5 bits: `scale * code + min`; 6 bits per number.
        Q5_1 = "q5_1" (7), affine::Affine<5>;
        /// 32 signed bytes: `scale * code`; 8.5 bits per number.
        Q8_0 = "q8_0" (8), scaled::Scaled<8>;
        /// 256 codes of 4 bits, in groups of 32 with a scale and a minimum of 6 bits; 4.5 bits per
        /// number.
        Q4K = "q4_k" (12), affine_k::AffineK<4>;
        /// 256 codes of 5 bits, in groups of 32 with a scale and a minimum of 6 bits; 5.5 bits per
        /// number.
        Q5K = "q5_k" (13), affine_k::AffineK<5>;
        /// 256 codes of 6 bits, in groups of 16 with a scale of 8 bits; 6.5625 bits per number.
        Q6K = "q6_k" (14), q6_k::Q6K;
        /// 32 numbers of 4 bits (E2M1) with a power of two, as in the Open Compute Project's
        /// "Microscaling Formats", in GGUF's order; 4.25 bits per number.
        Mxfp4 = "mxfp4" (39), mxfp4::Mxfp4;
    }
    grouped {
        /// Codes of 4 bits in groups: `scale * (code - zero)`, with both for each group; 5, 4.5 or
        /// 4.25 bits per number.
        Int4 = "int4-g32", "int4-g64", "int4-g128", grouped::Int4;
        /// Codes of 8 bits in groups: `scale * (code - zero)`, with both for each group; 9, 8.5 or
        /// 8.25 bits per number.
        Int8 = "int8-g32", "int8-g64", "int8-g128", grouped::Int8;
    }
    floats {
        /// Numbers of 16 bits (IEEE 754), in blocks of 32. Widening to f32 is exact: subnormal
        /// numbers, infinities, NaN and both zeros are kept.
        F16 = "f16" (1), floats::F16;
        /// The upper 16 bits of numbers in f32, in blocks of 32. Subnormal numbers are also
        /// subnormal in f32, which a GPU may flush to 0. Infinities and NaN are kept.
        Bf16 = "bf16" (30), floats::Bf16;
    }
}

#[allow(
    clippy::single_component_path_imports,
    reason = "clippy does not see macros that are defined by a macro"
)]
pub(crate) use with_blocks;
#[allow(
    clippy::single_component_path_imports,
    reason = "clippy does not see macros that are defined by a macro"
)]
#[cfg(feature = "cube")]
pub(crate) use with_kernels;

impl WeightFormat {
    /// Returns the number of weights in a block.
    pub const fn block_numbers(self) -> usize {
        self.spec().numbers
    }

    /// Returns the number of bytes in a block.
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

    /// Returns the index of the first block whose numbers are not all finite in f32.
    pub(crate) fn not_finite(self, blocks: &[u8]) -> Option<usize> {
        let &Spec { bytes, halves, exponent, .. } = self.spec();
        blocks.chunks_exact(bytes).position(|block| {
            // An f16 with all exponent bits set is infinite or NaN.
            halves.iter().fold(false, |any, at| any | (block[at + 1] & 0x7c == 0x7c))
                // The largest code is 6, so two exponents below that of NaN also overflow.
                || exponent.is_some_and(|at| block[at] > 252)
                || self == Self::Bf16 && !floats::bf16_finite(block)
        })
    }

    /// Returns the format with this GGML type number, if there is one.
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
