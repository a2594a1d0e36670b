//! The table of formats. A new format is an entry here, and a folder if its codec is new.
//!
//! Both macros pass their table to the macro of a given name, so this file imports no format.

/// Passes all packed formats to a macro, by codec.
///
/// `folder::Name` is a codec: the type `Name` with `SPEC`, [`CpuCodec`](super::flex::CpuCodec) and
/// [`CubeCodec`](super::in_kernels::CubeCodec). Its formats are listed as variant, name, bits of a
/// code, groups and description. Formats after `;` are available to frame caches only.
macro_rules! codecs {
    ($with:ident) => {
        $with! {
            /// `code * scale + min`, with scale and minimum in f16.
            affine::Affine {
                Affine2(
                    "2", 2, Groups::Kivi,
                    "2-bit codes with an f16 scale and minimum per group (KIVI)"
                )
                Affine3(
                    "3", 3, Groups::Kivi,
                    "3-bit codes with an f16 scale and minimum per group (KIVI)"
                )
                Affine4(
                    "4", 4, Groups::Kivi,
                    "4-bit codes with an f16 scale and minimum per group (KIVI)"
                )
                Affine8(
                    "8", 8, Groups::Kivi,
                    "8-bit codes with an f16 scale and minimum per group (KIVI)"
                )
                ;
            }
            /// `(code * scale + min) * factor`, with all three in f16: affine codes of a tile of
            /// tokens whose variances were normalized.
            normalized::Normalized {
                Normalized2(
                    "vn2", 2, Groups::Tile,
                    "2-bit codes of variance-normalized tiles, Hadamard-transformed (KVarN)"
                )
                Normalized3(
                    "vn3", 3, Groups::Tile,
                    "3-bit codes of variance-normalized tiles, Hadamard-transformed (KVarN)"
                )
                Normalized4(
                    "vn4", 4, Groups::Tile,
                    "4-bit codes of variance-normalized tiles, Hadamard-transformed (KVarN)"
                )
                ;
            }
            /// `level * scale`, with the scale in f16. Levels represent a normal distribution, and
            /// codes count them from the lowest.
            lloyd_max::LloydMax {
                LloydMax2(
                    "tq2", 2, Groups::Token,
                    "2-bit Lloyd-Max codes of a normal distribution with an f16 scale per token \
and head, Hadamard-transformed (TurboQuant)"
                )
                LloydMax3("tq3", 3, Groups::Token, "3-bit Lloyd-Max codes, as `tq2`")
                LloydMax4("tq4", 4, Groups::Token, "4-bit Lloyd-Max codes, as `tq2`")
                ;
            }
            /// `code * scale`: signed 8-bit codes from -127 to 127, with the scale in f16.
            int8::Int8 {
                Int8(
                    "int8", 8, Groups::Token,
                    "Signed bytes with an f16 scale per token and head"
                )
                Int8Groups(
                    "int8g", 8, Groups::Kivi,
                    "Signed bytes with an f16 scale per group, which is per channel for keys"
                )
                ;
                Int8Frames(
                    "int8f", 8, Groups::Frame(FrameScale::Largest),
                    "Signed bytes with a scale per head and frame, from a running amax; frame \
caches only"
                )
                Int8Percentile(
                    "int8p", 8, Groups::Frame(FrameScale::Percentile),
                    "Signed bytes with a scale per head and frame, from a running percentile \
beyond which numbers saturate; frame caches only"
                )
            }
            /// 8-bit floats with 4 bits of exponent and 3 of mantissa; scale in f16.
            float8::E4m3 {
                E4m3(
                    "e4m3", 8, Groups::Token,
                    "8-bit E4M3 floats with an f16 scale per token and head"
                )
                ;
            }
            /// 8-bit floats with 5 bits of exponent and 2 of mantissa; scale in f16.
            float8::E5m2 {
                E5m2(
                    "e5m2", 8, Groups::Token,
                    "8-bit E5M2 floats with an f16 scale per token and head"
                )
                ;
            }
            /// E4M3 floats scaled by the smallest power of two at which no number saturates.
            blocks::E4m3Blocks {
                E4m3Blocks(
                    "e4m3b", 8, Groups::Blocks(32),
                    "8-bit E4M3 floats in blocks of 32 channels, scaled by the smallest power of \
two at which no number saturates (DeepSeek)"
                )
                E4m3Blocks64(
                    "e4m3b64", 8, Groups::Blocks(64),
                    "8-bit E4M3 floats in blocks of 64 channels, scaled as `e4m3b` (DeepSeek-V4's \
entries)"
                )
                ;
            }
            /// 4-bit floats with 2 bits of exponent and 1 of mantissa, scaled by the smallest power
            /// of two at which no number saturates.
            blocks::E2m1Blocks {
                E2m1Blocks(
                    "e2m1b", 4, Groups::Blocks(32),
                    "4-bit E2M1 floats in blocks of 32 channels, scaled as `e4m3b`"
                )
                ;
            }
            /// E2M1 floats scaled by OCP's power of two; the largest numbers may saturate.
            blocks::Mxfp4 {
                Mxfp4(
                    "mxfp4", 4, Groups::Blocks(32),
                    "OCP's MXFP4: 4-bit E2M1 floats in blocks of 32 channels, scaled by a power of \
two at which the largest numbers may saturate"
                )
                ;
            }
        }
    };
}

/// Passes all float types to a macro. `folder::Name` is a type that implements
/// [`FloatFormat`](super::float::FloatFormat).
macro_rules! floats {
    ($with:ident) => {
        $with! {
            /// 32-bit float.
            #[default]
            f32::F32,
            /// IEEE half precision; keys and values are rounded to it when they enter the cache.
            f16::F16,
            /// bfloat16, with the range of f32; keys and values are rounded to it when they enter
            /// the cache.
            bf16::Bf16,
        }
    };
}

pub(super) use codecs;
pub(super) use floats;
