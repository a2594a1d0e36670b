//! Generates [`KvFormat`] from the [table](super::table), and maps codecs to implementations.

#[cfg(feature = "flex")]
use super::flex::CpuCodec;
use super::{
    Codec,
    groups::{FrameScale, Groups},
    packed::CodecSpec,
    table::codecs,
};

/// The entry of a quantized format in the table.
pub(super) struct Stored {
    /// The format's name in short names of configurations and in files.
    pub(super) name: &'static str,
    pub(super) format: Codec,
    pub(super) n_bits: u32,
    pub(super) groups: Groups,
    pub(super) description: &'static str,
}

macro_rules! registry {
    ($($(#[$doc:meta])* $module:ident::$Codec:ident {
        $($Format:ident($name:literal, $n_bits:literal, $groups:expr, $description:literal))+
        ;
        $($Frames:ident(
            $frames_name:literal, $frames_bits:literal, $frames_groups:expr,
            $frames_description:literal
        ))*
    })+) => {
        /// A format in which one side of a cache is stored.
        ///
        /// Files write KIVI's formats and float as a number of bits, and all others as a name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum KvFormat {
            /// Never quantized: all tokens are stored in the cache's
            /// [`CacheFloat`](crate::CacheFloat).
            Float,
            $(
                $(#[doc = concat!($description, ".")] $Format,)+
                $(
                    #[doc = concat!($frames_description, ".")]
                    ///
                    /// Scales follow from [`RunningScale`](crate::RunningScale). Every token keeps
                    /// the scale that it was written with.
                    $Frames,
                )*
            )+
        }

        impl KvFormat {
            /// Formats available to token caches; frame caches also accept
            /// [`FRAME_ONLY`](Self::FRAME_ONLY).
            pub const ALL: &[Self] = &[Self::Float, $($(Self::$Format,)+)+];

            /// Formats whose scales follow from whole frames.
            pub const FRAME_ONLY: &[Self] = &[$($(Self::$Frames,)*)+];

            /// Returns the format's entry in the table; `None` for float.
            pub(super) const fn stored(self) -> Option<&'static Stored> {
                match self {
                    Self::Float => None,
                    $(
                        $(Self::$Format => Some(&const { Stored {
                            name: $name,
                            format: Codec::$Codec,
                            n_bits: $n_bits,
                            groups: $groups,
                            description: $description,
                        } }),)+
                        $(Self::$Frames => Some(&const { Stored {
                            name: $frames_name,
                            format: Codec::$Codec,
                            n_bits: $frames_bits,
                            groups: $frames_groups,
                            description: $frames_description,
                        } }),)*
                    )+
                }
            }
        }

        impl Codec {
            /// Returns the constants of the codec.
            pub(super) const fn codec_spec(self) -> &'static CodecSpec {
                match self {
                    $(Self::$Codec => &super::$module::$Codec::SPEC,)+
                }
            }

            /// Returns the codec's implementation on the CPU.
            #[cfg(feature = "flex")]
            pub(crate) fn on_cpu(self) -> &'static dyn CpuCodec {
                match self {
                    $(Self::$Codec => &super::$module::$Codec,)+
                }
            }
        }
    };
}

codecs!(registry);
