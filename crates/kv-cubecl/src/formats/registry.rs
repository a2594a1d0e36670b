//! The formats of the [table](super::table) and what implements them.

#[cfg(feature = "flex")]
use super::flex::CpuCodec;
use super::{
    Codec,
    groups::{Groups, OfFrames},
    packed::CodecSpec,
    table::codecs,
};

/// How a format stores a side.
pub(super) struct Stored {
    /// Its name in the short names of configurations, and in files.
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
            $frames_name:literal, $frames_bits:literal, $frames_groups:expr, $frames_description:literal
        ))*
    })+) => {
        /// How one side of a cache is stored.
        ///
        /// In files a format is its number of bits if it is one of KIVI's or float, and otherwise
        /// its name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum KvFormat {
            /// Never quantized: all tokens are of the cache's [`CacheFloat`](crate::CacheFloat).
            Float,
            $(
                $(#[doc = concat!($description, ".")] $Format,)+
                $(
                    #[doc = concat!($frames_description, ".")]
                    ///
                    /// See [`RunningScale`](crate::RunningScale). Every token keeps the scale that
                    /// it was written with.
                    $Frames,
                )*
            )+
        }

        impl KvFormat {
            /// Formats of token caches; frame caches also accept [`OF_FRAMES`](Self::OF_FRAMES).
            pub const ALL: &[Self] = &[Self::Float, $($(Self::$Format,)+)+];

            /// Formats that take their scales from frames.
            pub const OF_FRAMES: &[Self] = &[$($(Self::$Frames,)*)+];

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
