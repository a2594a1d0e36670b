//! How tokens are packed once they leave the window: in groups of codes with a parameter word each.

use serde::{Deserialize, Serialize};

use crate::{Error, Result, error::invalid};

/// Bits per stored element of one side (keys or values) of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "u8", try_from = "u8")]
pub enum Bits {
    /// 2 bits, 16 codes per u32 word.
    Two,
    /// 4 bits, 8 codes per u32 word.
    Four,
    /// 8 bits, 4 codes per u32 word.
    Eight,
    /// Left in float: this side is never quantized.
    Float,
}

impl Bits {
    /// Bits per code; 16 means float.
    pub const fn n_bits(self) -> u32 {
        match self {
            Bits::Two => 2,
            Bits::Four => 4,
            Bits::Eight => 8,
            Bits::Float => 16,
        }
    }

    /// Whether this side is quantized at all.
    pub const fn is_quantized(self) -> bool {
        !matches!(self, Bits::Float)
    }
}

impl From<Bits> for u8 {
    fn from(bits: Bits) -> u8 {
        bits.n_bits() as u8
    }
}

impl TryFrom<u8> for Bits {
    type Error = Error;

    fn try_from(n_bits: u8) -> Result<Self> {
        Ok(match n_bits {
            2 => Bits::Two,
            4 => Bits::Four,
            8 => Bits::Eight,
            16 => Bits::Float,
            _ => return Err(invalid("n_bits", n_bits, "must be 2, 4, 8, or 16 for float")),
        })
    }
}

/// The formats of packed tokens: what the codes of a group and its parameter word say.
///
/// How groups lie in tensors and words is the same for all ([`QuantSpec`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PackedFormat {
    /// `code * scale + min`, with scale and minimum in f16.
    Affine,
}

/// Which axis shares one scale and minimum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// Groups of consecutive tokens within one channel: the keys of KIVI.
    PerChannel,
    /// Groups of consecutive channels within one token: the values of KIVI.
    PerToken,
}

/// How a tensor `[.., tokens, head_dim]` is quantized, and where its words are.
///
/// Tokens are packed in granules of [`granule`](Self::granule) tokens, the fewest that hold whole groups.
/// A granule has [`groups`](Self::groups) groups: first come the code words of all of them, then one
/// parameter word for each. The words of a group are next to one another per token; per channel, those of
/// neighboring channels are, so that word `j` of a group is `head_dim` words after word `j - 1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantSpec {
    /// What codes and parameters mean.
    pub format: PackedFormat,
    /// Which axis is grouped.
    pub granularity: Granularity,
    /// Bits per code: 2, 4 or 8.
    pub n_bits: u32,
    /// Elements per group.
    pub group_size: usize,
}

impl QuantSpec {
    /// [Affine](PackedFormat::Affine) codes. Checks the bits, and that groups fill whole words.
    ///
    /// # Errors
    /// [`InvalidConfig`](crate::Error::InvalidConfig) naming the field.
    pub fn new(granularity: Granularity, bits: Bits, group_size: usize) -> Result<Self> {
        if !bits.is_quantized() {
            return Err(invalid("n_bits", 16, "must be 2, 4 or 8 to quantize"));
        }
        let (format, n_bits) = (PackedFormat::Affine, bits.n_bits());
        let spec = Self { format, granularity, n_bits, group_size };
        if group_size == 0 || !group_size.is_multiple_of(spec.codes_per_word()) {
            let rule = format!("must be a positive multiple of {}", spec.codes_per_word());
            return Err(invalid("group_size", group_size, rule));
        }
        Ok(spec)
    }

    /// Codes in one u32 word, least significant bits first.
    pub const fn codes_per_word(&self) -> usize {
        32 / self.n_bits as usize
    }

    /// Largest code, `2^n_bits - 1`.
    pub const fn max_code(&self) -> u32 {
        (1 << self.n_bits) - 1
    }

    /// Words of one group: its codes and its parameters.
    pub const fn words_per_group(&self) -> usize {
        self.group_size / self.codes_per_word() + 1
    }

    /// Tokens that are packed together: a group of them per channel, one per token.
    pub const fn granule(&self) -> usize {
        match self.granularity {
            Granularity::PerChannel => self.group_size,
            Granularity::PerToken => 1,
        }
    }

    /// Groups of a granule.
    pub const fn groups(&self, head_dim: usize) -> usize {
        match self.granularity {
            Granularity::PerChannel => head_dim,
            Granularity::PerToken => head_dim / self.group_size,
        }
    }

    /// Words of one (batch, head) slice of `tokens x head_dim` elements.
    pub const fn words(&self, tokens: usize, head_dim: usize) -> usize {
        tokens * head_dim / self.group_size * self.words_per_group()
    }
}
