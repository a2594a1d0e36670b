//! How a side of a cache, its keys or its values, is stored once its tokens leave the window.

use core::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::{Codec, Granularity, QuantSpec};
use crate::{Result, Side, error::invalid};

/// How one side of a cache is stored.
///
/// In files a format is its number of bits where it is one of KIVI's or float, and otherwise its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KvFormat {
    /// Never quantized: all tokens are of the cache's [`CacheFloat`](crate::CacheFloat).
    Float,
    /// KIVI's groups with scale and minimum, 2 bits: of tokens for keys, of channels for values.
    Affine2,
    /// The same with 4 bits.
    Affine4,
    /// The same with 8 bits.
    Affine8,
    /// Signed 8 bits, `-127` to `127`, with a scale for each token and head, `f16(amax / 127)`.
    Int8,
    /// The same with a scale for each of KIVI's groups: of tokens for keys, which is per channel, of channels for values.
    Int8Groups,
    /// The same with a scale for each head and frame, `f16(amax / 127)` of a running amax that follows the largest
    /// magnitudes of frames ([`RunningScale`](crate::RunningScale)). Every token keeps the scale that it was written
    /// with. For caches of frames alone.
    Int8Frames,
    /// The same of a running percentile of magnitudes, beyond which numbers saturate.
    Int8Percentile,
    /// E4M3 floats of 8 bits with a scale for each token and head, `f16(amax / 448)`.
    E4m3,
    /// E5M2 floats of 8 bits with a scale for each token and head, `f16(amax / 57344)`.
    E5m2,
    /// E4M3 in blocks of 32 channels with powers of two as scales, as DeepSeek has them.
    E4m3Blocks,
    /// E2M1 floats of 4 bits in such blocks.
    E2m1Blocks,
    /// OCP's MXFP4: E2M1 in blocks of 32 channels with its powers of two.
    Mxfp4,
}

/// What a format has to say of how a side is stored in it.
pub(super) struct Stored {
    /// What it is called in the short names of configurations, and in files.
    pub(super) name: &'static str,
    pub(super) format: Codec,
    pub(super) n_bits: u32,
    pub(super) groups: Groups,
}

/// What shares a parameter.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Groups {
    /// As KIVI has them, of the configuration's group size: tokens for keys, channels for values.
    Kivi,
    /// All channels of a token.
    Token,
    /// So many channels of a token.
    Blocks(usize),
    /// All tokens of a head of a frame, each of which has the parameter for itself.
    Frame(OfFrames),
}

/// Of which magnitude of a frame a scale is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OfFrames {
    /// The largest.
    Largest,
    /// One that most do not exceed.
    Percentile,
}

impl KvFormat {
    /// All that caches of tokens store; those of frames have [two more](Self::OF_FRAMES).
    pub const ALL: &[Self] = &[
        Self::Float,
        Self::Affine2,
        Self::Affine4,
        Self::Affine8,
        Self::Int8,
        Self::Int8Groups,
        Self::E4m3,
        Self::E5m2,
        Self::E4m3Blocks,
        Self::E2m1Blocks,
        Self::Mxfp4,
    ];

    /// Those that take their scales from frames.
    pub const OF_FRAMES: &[Self] = &[Self::Int8Frames, Self::Int8Percentile];

    const fn stored(self) -> Option<&'static Stored> {
        match self {
            Self::Float => None,
            Self::Affine2 => Some(&super::affine::STORED[0]),
            Self::Affine4 => Some(&super::affine::STORED[1]),
            Self::Affine8 => Some(&super::affine::STORED[2]),
            Self::Int8 => Some(&super::int8::STORED),
            Self::Int8Groups => Some(&super::int8::STORED_GROUPS),
            Self::Int8Frames => Some(&super::int8::STORED_FRAMES),
            Self::Int8Percentile => Some(&super::int8::STORED_PERCENTILE),
            Self::E4m3 => Some(&super::float8::STORED_E4M3),
            Self::E5m2 => Some(&super::float8::STORED_E5M2),
            Self::E4m3Blocks => Some(&super::blocks::STORED_E4M3),
            Self::E2m1Blocks => Some(&super::blocks::STORED_E2M1),
            Self::Mxfp4 => Some(&super::blocks::STORED_MXFP4),
        }
    }

    /// What it is called in the short names of configurations.
    pub const fn name(self) -> &'static str {
        match self.stored() {
            Some(stored) => stored.name,
            None => "16",
        }
    }

    /// The format of a name; `None` if there is none of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().chain(Self::OF_FRAMES).copied().find(|format| format.name() == name)
    }

    /// The bits of a code, if it is one of KIVI's formats.
    pub const fn affine_bits(self) -> Option<u32> {
        match self.stored() {
            Some(&Stored { format: Codec::Affine, n_bits, .. }) => Some(n_bits),
            _ => None,
        }
    }

    /// Bits of a code; 16 means float.
    pub const fn n_bits(self) -> u32 {
        match self.stored() {
            Some(stored) => stored.n_bits,
            None => 16,
        }
    }

    /// Whether tokens of this side are quantized at all.
    pub const fn is_quantized(self) -> bool {
        self.stored().is_some()
    }

    /// Whether its groups are of the configuration's group size.
    pub const fn is_grouped(self) -> bool {
        matches!(self.stored(), Some(Stored { groups: Groups::Kivi, .. }))
    }

    /// How scales are taken from frames; `None` where they are not.
    pub(crate) const fn of_frames(self) -> Option<OfFrames> {
        match self.stored() {
            Some(&Stored { groups: Groups::Frame(of), .. }) => Some(of),
            _ => None,
        }
    }

    /// What a cache of tokens is to store in its place: where scales are taken from frames, tokens have each their own.
    pub(crate) const fn of_tokens(self) -> Self {
        match self {
            Self::Int8Frames | Self::Int8Percentile => Self::Int8,
            other => other,
        }
    }

    /// Which axis is grouped on a side; `None` in float.
    pub const fn granularity(self, side: Side) -> Option<Granularity> {
        match (self.stored(), side) {
            (None, _) => None,
            (Some(Stored { groups: Groups::Kivi, .. }), Side::Keys) => {
                Some(Granularity::PerChannel)
            }
            (Some(_), _) => Some(Granularity::PerToken),
        }
    }

    /// How the tokens of a side of so many channels are quantized; `None` in float. `group_size` counts where a format
    /// [has such groups](Self::is_grouped).
    pub const fn spec(self, side: Side, head_dim: usize, group_size: usize) -> Option<QuantSpec> {
        let (Some(stored), Some(granularity)) = (self.stored(), self.granularity(side)) else {
            return None;
        };
        let group_size = match stored.groups {
            Groups::Kivi => group_size,
            Groups::Token | Groups::Frame(_) => head_dim,
            Groups::Blocks(channels) => channels,
        };
        let &Stored { format, n_bits, .. } = stored;
        Some(QuantSpec { format, granularity, n_bits, group_size })
    }

    /// Checks that it can store a side of so many channels in groups of this size.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) naming the field, its value and the rule.
    pub(crate) fn validate(self, side: Side, head_dim: usize, group_size: usize) -> Result<()> {
        let Some(stored) = self.stored() else { return Ok(()) };
        let (name, codes_per_word) = (stored.name, 32 / stored.n_bits as usize);
        match stored.groups {
            Groups::Kivi => {
                if !group_size.is_multiple_of(codes_per_word) {
                    let rule = format!(
                        "must be a multiple of the {codes_per_word} codes in a word at {} bits",
                        stored.n_bits
                    );
                    return Err(invalid("group_size", group_size, rule));
                }
            }
            Groups::Blocks(channels) => {
                if !head_dim.is_multiple_of(channels) {
                    let rule = format!(
                        "must be a multiple of the {channels} channels of a block for {side} as {name}"
                    );
                    return Err(invalid("head_dim", head_dim, rule));
                }
            }
            Groups::Frame(_) => {
                let rule = "takes its scales from frames: for caches of frames alone";
                let field = match side {
                    Side::Keys => "keys",
                    Side::Values => "values",
                };
                return Err(invalid(field, name, rule));
            }
            Groups::Token => {
                if !head_dim.is_multiple_of(codes_per_word) {
                    let rule = format!(
                        "must be a multiple of the {codes_per_word} codes in a word for {side} as {name}"
                    );
                    return Err(invalid("head_dim", head_dim, rule));
                }
            }
        }
        Ok(())
    }

    /// All names, for messages.
    pub(crate) fn names() -> String {
        let all = Self::ALL[1..].iter().chain(Self::OF_FRAMES);
        let names: Vec<_> = all.map(|format| format.name()).collect();
        format!("{} or 16 for float", names.join(", "))
    }
}

impl fmt::Display for KvFormat {
    /// Its name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl KvFormat {
    /// The number that stands for the format in files; `None` if its name does.
    fn file_number(self) -> Option<u32> {
        match self {
            Self::Float => Some(self.n_bits()),
            _ => self.affine_bits(),
        }
    }
}

impl Serialize for KvFormat {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.file_number() {
            Some(number) => serializer.serialize_u32(number),
            None => serializer.serialize_str(self.name()),
        }
    }
}

impl<'de> Deserialize<'de> for KvFormat {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Visitor)
    }
}

/// Reads a number of bits or a name.
struct Visitor;

impl de::Visitor<'_> for Visitor {
    type Value = KvFormat;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = KvFormat::ALL.iter().chain(KvFormat::OF_FRAMES);
        let names = all.filter(|format| format.file_number().is_none());
        let names: Vec<_> = names.map(|format| format!("{:?}", format.name())).collect();
        write!(f, "2, 4, 8, or 16 for float, or one of {}", names.join(", "))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<KvFormat, E> {
        let found = KvFormat::ALL.iter().copied();
        let mut found = found.filter(|format| format.file_number().map(u64::from) == Some(number));
        found.next().ok_or_else(|| E::invalid_value(de::Unexpected::Unsigned(number), &self))
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<KvFormat, E> {
        // Formats that are numbers in files are not also names there.
        let found = KvFormat::named(name).filter(|format| format.file_number().is_none());
        found.ok_or_else(|| E::invalid_value(de::Unexpected::Str(name), &self))
    }
}
