//! [`KvFormat`]: names, rules and serialization of the formats of a side.

use core::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::{
    Codec, Granularity, QuantSpec,
    groups::{FrameScale, GroupOptions, Groups},
    range::GroupRange,
    registry::{KvFormat, Stored},
};
use crate::{Result, Side, error::invalid};

impl KvFormat {
    /// Returns the format's name in short names of configurations.
    pub const fn name(self) -> &'static str {
        match self.stored() {
            Some(stored) => stored.name,
            None => "16",
        }
    }

    /// Returns one line that describes how tokens are stored.
    pub const fn description(self) -> &'static str {
        match self.stored() {
            Some(stored) => stored.description,
            None => "The cache's float type: f32, f16 or bf16",
        }
    }

    /// Returns the rows of a Markdown table of all formats: name, bits of a code, description.
    pub fn markdown_rows() -> String {
        let all = Self::ALL.iter().chain(Self::FRAME_ONLY);
        let row = |format: &Self| {
            format!("| `{format}` | {} | {} |\n", format.n_bits(), format.description())
        };
        all.map(row).collect()
    }

    /// Returns the format of this name, if there is one.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().chain(Self::FRAME_ONLY).copied().find(|format| format.name() == name)
    }

    /// Returns the number of bits of a code in KIVI's formats; `None` in all others.
    pub const fn affine_bits(self) -> Option<u32> {
        match self.stored() {
            Some(&Stored { format: Codec::Affine, n_bits, .. }) => Some(n_bits),
            _ => None,
        }
    }

    /// Returns the number of bits of a code; 16 for float.
    pub const fn n_bits(self) -> u32 {
        match self.stored() {
            Some(stored) => stored.n_bits,
            None => 16,
        }
    }

    /// Returns whether tokens are quantized.
    pub const fn is_quantized(self) -> bool {
        self.stored().is_some()
    }

    /// Returns whether groups have the configuration's group size.
    pub const fn is_grouped(self) -> bool {
        matches!(self.stored(), Some(Stored { groups: Groups::Kivi, .. }))
    }

    /// Returns whether tokens are quantized in the configuration's tiles.
    pub const fn is_tiled(self) -> bool {
        matches!(self.stored(), Some(Stored { groups: Groups::Tile, .. }))
    }

    /// Returns whether tokens are quantized after a Hadamard transform, whatever the configuration
    /// says.
    pub const fn needs_hadamard(self) -> bool {
        match self.stored() {
            Some(stored) => stored.format.codec_spec().needs_hadamard,
            None => false,
        }
    }

    /// Returns whether the codes of a group cover a range that the configuration chooses.
    pub const fn has_range(self) -> bool {
        matches!(self.stored(), Some(Stored { format: Codec::Affine | Codec::Normalized, .. }))
    }

    /// Returns the default range: what loses least on keys and values of language models.
    pub const fn default_range(self) -> GroupRange {
        match self {
            Self::Normalized2 => GroupRange::Sigma(195),
            _ => GroupRange::MinMax,
        }
    }

    /// Returns the magnitude of a frame from which scales follow; `None` if they do not follow from
    /// frames.
    pub(crate) const fn frame_scale(self) -> Option<FrameScale> {
        match self.stored() {
            Some(&Stored { groups: Groups::Frame(scale), .. }) => Some(scale),
            _ => None,
        }
    }

    /// Replaces a [frame format](Self::FRAME_ONLY) by the format of the same codec with one scale
    /// per token. Returns other formats unchanged.
    pub(crate) const fn with_token_scales(self) -> Self {
        let Some(&Stored { format, groups: Groups::Frame(_), .. }) = self.stored() else {
            return self;
        };
        let mut i = 0;
        while i < Self::ALL.len() {
            if let Some(other) = Self::ALL[i].stored()
                && matches!(other.groups, Groups::Token)
                && other.format as usize == format as usize
            {
                return Self::ALL[i];
            }
            i += 1;
        }
        self
    }

    /// Returns the grouped axis of a side; `None` in float.
    pub const fn granularity(self, side: Side) -> Option<Granularity> {
        match (self.stored(), side) {
            (None, _) => None,
            (Some(Stored { groups: Groups::Kivi | Groups::Tile, .. }), Side::Keys) => {
                Some(Granularity::PerChannel)
            }
            (Some(_), _) => Some(Granularity::PerToken),
        }
    }

    /// Returns how the tokens of a side with `head_dim` channels are quantized; `None` in float.
    ///
    /// Formats ignore the options that they do not have.
    pub const fn spec(
        self,
        side: Side,
        head_dim: usize,
        options: GroupOptions,
    ) -> Option<QuantSpec> {
        let (Some(stored), Some(granularity)) = (self.stored(), self.granularity(side)) else {
            return None;
        };
        let (group_size, tile) = match (stored.groups, granularity) {
            (Groups::Kivi, _) => (options.group_size, None),
            (Groups::Tile, Granularity::PerChannel) => (options.tile.tokens, Some(options.tile)),
            (Groups::Tile, Granularity::PerToken) => (head_dim, Some(options.tile)),
            (Groups::Token | Groups::Frame(_), _) => (head_dim, None),
            (Groups::Blocks(channels), _) => (channels, None),
        };
        let range = if self.has_range() { options.range } else { GroupRange::MinMax };
        let &Stored { format, n_bits, .. } = stored;
        Some(QuantSpec { format, granularity, n_bits, group_size, range, tile })
    }

    /// Checks that the format can store a side with `head_dim` channels.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) naming the field, its value and the
    /// rule.
    pub(crate) fn validate(self, side: Side, head_dim: usize, options: GroupOptions) -> Result<()> {
        let Some(stored) = self.stored() else { return Ok(()) };
        let name = stored.name;
        let whole =
            self.spec(side, head_dim, options).map_or(1, |spec| spec.codes_in_whole_words());
        let (field, value, multiple, why) = match stored.groups {
            Groups::Kivi => {
                let why = format!("{whole} codes of {} bits fill whole words", stored.n_bits);
                ("group_size", options.group_size, whole, why)
            }
            Groups::Blocks(channels) => {
                let why = format!("the channels of a block of {side} as {name}");
                ("head_dim", head_dim, channels, why)
            }
            Groups::Token | Groups::Tile => {
                let why = format!("the codes in a word of {side} as {name}");
                ("head_dim", head_dim, whole, why)
            }
            Groups::Frame(_) => {
                let rule = format!(
                    "is available to frame caches only, as its scales follow from frames; try {}",
                    self.with_token_scales()
                );
                return Err(invalid(side.name(), name, rule));
            }
        };
        if !value.is_multiple_of(multiple) {
            let rule = format!("must be a multiple of {multiple}: {why}");
            return Err(invalid(field, value, rule));
        }
        Ok(())
    }

    /// Returns all names in one line, for messages and help.
    pub fn names() -> String {
        let all = Self::ALL[1..].iter().chain(Self::FRAME_ONLY);
        let names: Vec<_> = all.map(|format| format.name()).collect();
        format!("{} or 16 for float", names.join(", "))
    }
}

impl QuantSpec {
    /// Describes groups of one of KIVI's formats, and checks that they fill whole words.
    ///
    /// # Errors
    /// [`InvalidConfig`](crate::Error::InvalidConfig) naming the field.
    pub fn new(granularity: Granularity, format: KvFormat, group_size: usize) -> Result<Self> {
        let Some(n_bits) = format.affine_bits() else {
            return Err(invalid("format", format, "must be one of KIVI's: 2, 3, 4 or 8"));
        };
        let (range, tile) = (GroupRange::MinMax, None);
        let spec = Self { format: Codec::Affine, granularity, n_bits, group_size, range, tile };
        let whole = spec.codes_in_whole_words();
        if group_size == 0 || !group_size.is_multiple_of(whole) {
            let rule = format!("must be a positive multiple of {whole}");
            return Err(invalid("group_size", group_size, rule));
        }
        Ok(spec)
    }
}

impl fmt::Display for KvFormat {
    /// Writes the name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl KvFormat {
    /// Returns the number that stands for the format in files; `None` if its name does.
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

/// Reads a format from a number of bits or a name.
struct Visitor;

impl de::Visitor<'_> for Visitor {
    type Value = KvFormat;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = || KvFormat::ALL[1..].iter().chain(KvFormat::FRAME_ONLY);
        let numbers = all().filter_map(|format| format.file_number());
        let numbers: Vec<_> = numbers.map(|number| number.to_string()).collect();
        let names = all().filter(|format| format.file_number().is_none());
        let names: Vec<_> = names.map(|format| format!("{:?}", format.name())).collect();
        write!(f, "{}, or 16 for float, or one of {}", numbers.join(", "), names.join(", "))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<KvFormat, E> {
        let found = KvFormat::ALL.iter().copied();
        let mut found = found.filter(|format| format.file_number().map(u64::from) == Some(number));
        found.next().ok_or_else(|| E::invalid_value(de::Unexpected::Unsigned(number), &self))
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<KvFormat, E> {
        // A format has one spelling in files: a number or a name, never both.
        let found = KvFormat::named(name).filter(|format| format.file_number().is_none());
        found.ok_or_else(|| E::invalid_value(de::Unexpected::Str(name), &self))
    }
}
