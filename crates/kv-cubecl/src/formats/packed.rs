//! How tokens are packed when they leave the residual: groups of codes with one parameter each.

use super::{minifloat::Minifloat, range::GroupRange, table::codecs, tile::Tile};

macro_rules! codec_enum {
    ($($(#[$doc:meta])* $module:ident::$Codec:ident { $($formats:tt)* })+) => {
        /// The codec of packed tokens: the meaning of a group's codes and parameter.
        ///
        /// The layout of groups in words and tensors is the same for all codecs ([`QuantSpec`]).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[cfg_attr(feature = "remote", derive(serde::Serialize, serde::Deserialize))]
        #[non_exhaustive]
        pub enum Codec {
            $($(#[$doc])* $Codec,)+
        }
    };
}

codecs!(codec_enum);

/// The constants of a codec.
pub(super) struct CodecSpec {
    /// See [`Codec::parameter_bits`].
    pub(super) parameter_bits: usize,
    /// See [`QuantSpec::largest`]; numbers from 2 bits on if they depend on the bits of a code.
    pub(super) largest: Option<&'static [f32]>,
    /// See [`Codec::limit`].
    pub(super) limit: f32,
    /// See [`Codec::float`].
    pub(super) float: Option<Minifloat>,
    /// See [`Codec::scales_by_norm`].
    pub(super) scales_by_norm: bool,
    /// True if the codec is for numbers after the Hadamard transform.
    pub(super) needs_hadamard: bool,
}

impl Codec {
    /// Returns the number of bits of a group's parameter.
    pub const fn parameter_bits(self) -> usize {
        self.codec_spec().parameter_bits
    }

    /// Returns whether the parameter holds an offset besides the scale, so that code 0 need not
    /// stand for 0.
    pub const fn has_offset(self) -> bool {
        self.codec_spec().largest.is_none()
    }

    /// Returns the largest magnitude that is quantized. Larger magnitudes, also infinite ones, are
    /// clamped to it, so that restored numbers are finite.
    pub const fn limit(self) -> f32 {
        self.codec_spec().limit
    }

    /// Returns whether a group's scale follows from its norm instead of its extremes.
    pub(crate) const fn scales_by_norm(self) -> bool {
        self.codec_spec().scales_by_norm
    }

    /// Returns the float type of the codes; `None` if codes are integers.
    pub(super) const fn float(self) -> Option<Minifloat> {
        self.codec_spec().float
    }
}

/// The axis whose elements share one parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "remote", derive(serde::Serialize, serde::Deserialize))]
pub enum Granularity {
    /// Groups of consecutive tokens of one channel, as KIVI's keys.
    PerChannel,
    /// Groups of consecutive channels of one token, as KIVI's values; or all of its channels.
    PerToken,
}

/// The quantization of a tensor `[.., tokens, head_dim]`, and the layout of its words.
///
/// Codes of 2, 4 and 8 bits follow each other in a word, least significant bits first. 32 codes of
/// 3 bits take three words: two with the low 2 bits of 16 codes each, stored like 2-bit codes, then
/// one with the high bits of all 32.
///
/// Tokens are packed in blocks of [`block_tokens`](Self::block_tokens) tokens, the fewest that hold
/// whole groups. A block has [`groups`](Self::groups) groups: the code words of all groups, then
/// one parameter word per group. Per token, the words of a group are adjacent. Per channel, the
/// words of neighboring channels are adjacent, and word `j` of a group is `head_dim` words after
/// word `j - 1`.
///
/// If a slice is quantized per token and its [parameters](Codec::parameter_bits) are narrower than
/// a word, they are [packed](Self::packs_parameters) behind the code words of all tokens of the
/// slice, least significant bits first. One word may then hold parameters of several groups and
/// tokens.
///
/// A [tile](Self::tile) is one block on both sides. Behind its groups are its
/// [factors](Self::factors) in f16, two in a word: one for each token of keys, or one for each
/// channel of values. Restored numbers are multiplied by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "remote", derive(serde::Serialize, serde::Deserialize))]
pub struct QuantSpec {
    /// The meaning of codes and parameters.
    pub format: Codec,
    /// The grouped axis.
    pub granularity: Granularity,
    /// Bits per code: 2, 3, 4 or 8.
    pub n_bits: u32,
    /// Elements per group.
    pub group_size: usize,
    /// The range that the codes of a group cover, in affine formats.
    pub range: GroupRange,
    /// The tokens that are normalized together; `None` for formats without tiles.
    pub tile: Option<Tile>,
}

impl QuantSpec {
    /// Returns whether the parameters of an affine group follow from more than its extremes: from
    /// another range, or from its tile.
    #[cfg(feature = "cube")]
    pub(crate) const fn reads_twice(&self) -> bool {
        self.tile.is_some() || !matches!(self.range, GroupRange::MinMax)
    }

    /// Returns the largest number that a code stands for, before its scale; `None` for codecs with
    /// an [offset](Codec::has_offset).
    pub const fn largest(&self) -> Option<f32> {
        match self.format.codec_spec().largest {
            Some(&[one]) => Some(one),
            Some(all) => Some(all[self.n_bits as usize - 2]),
            None => None,
        }
    }

    /// Returns the number of factors of a tile with `head_dim` channels; 0 without tiles.
    pub const fn factors(&self, head_dim: usize) -> usize {
        match (self.tile, self.granularity) {
            (None, _) => 0,
            (Some(tile), Granularity::PerChannel) => tile.tokens,
            (Some(_), Granularity::PerToken) => head_dim,
        }
    }

    /// Returns the number of words of a block: its groups, then the factors of a tile.
    pub const fn block_words(&self, head_dim: usize) -> usize {
        self.groups(head_dim) * self.words_per_group() + self.factors(head_dim) / 2
    }

    /// Returns whether the high bit of each code is in another word than its low bits.
    pub const fn splits_codes(&self) -> bool {
        self.n_bits == 3
    }

    /// Returns the number of bits of a code that are stored together: all of them, or the low 2 of
    /// 3.
    pub const fn low_bits(&self) -> u32 {
        if self.splits_codes() { 2 } else { self.n_bits }
    }

    /// Returns the number of consecutive codes that share one u32 word with their
    /// [low bits](Self::low_bits).
    pub const fn codes_per_word(&self) -> usize {
        32 / self.low_bits() as usize
    }

    /// Returns the fewest codes that fill whole words.
    pub const fn codes_in_whole_words(&self) -> usize {
        if self.splits_codes() { 32 } else { self.codes_per_word() }
    }

    /// Returns the number of words that the codes of `n` elements of one token take.
    pub const fn words_of_codes(&self, n: usize) -> usize {
        n * self.n_bits as usize / 32
    }

    /// Returns which word of a group holds the low bits of run `run`: the codes from
    /// `run * codes_per_word()` on.
    pub const fn low_word(&self, run: usize) -> usize {
        if self.splits_codes() { run / 2 * 3 + run % 2 } else { run }
    }

    /// Returns which word of a group holds the high bits of run `run`, and the bit position of the
    /// first of them. Only for [split](Self::splits_codes) codes.
    pub const fn high_word(&self, run: usize) -> (usize, u32) {
        (run / 2 * 3 + 2, run as u32 % 2 * 16)
    }

    /// Returns code `index` of a group. `word` returns the words of the group's codes.
    pub fn code(&self, index: usize, word: impl Fn(usize) -> u32) -> u32 {
        let (run, nth) = (index / self.codes_per_word(), (index % self.codes_per_word()) as u32);
        let low =
            word(self.low_word(run)) >> (nth * self.low_bits()) & ((1 << self.low_bits()) - 1);
        if !self.splits_codes() {
            return low;
        }
        let (high, first) = self.high_word(run);
        low | (word(high) >> (first + nth) & 1) << 2
    }

    /// Returns the largest code, `2^n_bits - 1`.
    pub const fn max_code(&self) -> u32 {
        (1 << self.n_bits) - 1
    }

    /// Returns the number of code words of one group.
    pub const fn code_words(&self) -> usize {
        self.words_of_codes(self.group_size)
    }

    /// Returns the first word of group `nth` in [`Logical::codes`](crate::Logical::codes), and the
    /// distance from each of its words to the next.
    pub const fn logical_words(&self, nth: usize, head_dim: usize) -> (usize, usize) {
        match self.granularity {
            Granularity::PerChannel => {
                (nth / head_dim * self.code_words() * head_dim + nth % head_dim, head_dim)
            }
            Granularity::PerToken => (nth * self.code_words(), 1),
        }
    }

    /// Returns the number of words of one group, codes and parameter, if the parameter is a whole
    /// word.
    pub const fn words_per_group(&self) -> usize {
        self.code_words() + 1
    }

    /// Returns whether a code is at an end of the range: the lowest or highest code, or a code of
    /// the largest magnitude.
    ///
    /// If the parameter follows from the extremes of a group, every group that is not constant has
    /// such a code. Further ones come from numbers that saturate, or that are as large.
    pub const fn is_extreme(&self, code: u32) -> bool {
        match self.format.float() {
            Some(float) => code & (float.sign - 1) == float.first_special - 1,
            None if self.format.has_offset() || self.format.scales_by_norm() => {
                code == 0 || code == self.max_code()
            }
            // 127 and -127 in two's complement.
            None => code == self.max_code() / 2 || code == self.max_code() / 2 + 2,
        }
    }

    /// Returns whether a code stands for -0: the sign bit alone of a float.
    pub(crate) const fn is_negative_zero(&self, code: u32) -> bool {
        match self.format.float() {
            Some(float) => code == float.sign,
            None => false,
        }
    }

    /// Returns the number of tokens that are quantized together: a tile, a group per channel, or
    /// one per token.
    pub const fn block_tokens(&self) -> usize {
        match (self.tile, self.granularity) {
            (Some(tile), _) => tile.tokens,
            (None, Granularity::PerChannel) => self.group_size,
            (None, Granularity::PerToken) => 1,
        }
    }

    /// Returns the number of groups in a block.
    pub const fn groups(&self, head_dim: usize) -> usize {
        match self.granularity {
            Granularity::PerChannel => head_dim,
            Granularity::PerToken => self.block_tokens() * (head_dim / self.group_size),
        }
    }

    /// Returns whether parameters share words, behind the codes of all tokens of a slice.
    pub const fn packs_parameters(&self) -> bool {
        matches!(self.granularity, Granularity::PerToken) && self.format.parameter_bits() < 32
    }

    /// Returns the number of tokens at whose multiples a slice may be cut without cutting a word.
    pub const fn alignment_tokens(&self, head_dim: usize) -> usize {
        if !self.packs_parameters() {
            return self.block_tokens();
        }
        // The fewest tokens whose parameters fill whole words.
        let mut tokens = 1;
        while !(tokens * self.groups(head_dim) * self.format.parameter_bits()).is_multiple_of(32) {
            tokens *= 2;
        }
        tokens
    }

    /// Returns the number of words of one (batch, head) slice of `tokens x head_dim` elements.
    pub const fn words(&self, tokens: usize, head_dim: usize) -> usize {
        match self.packs_parameters() {
            true => tokens * self.words_of_codes(head_dim) + self.parameter_words(tokens, head_dim),
            false => tokens / self.block_tokens() * self.block_words(head_dim),
        }
    }

    /// Returns the number of parameter words of `tokens` tokens, if parameters
    /// [share words](Self::packs_parameters).
    pub const fn parameter_words(&self, tokens: usize, head_dim: usize) -> usize {
        (tokens * self.groups(head_dim) * self.format.parameter_bits()).div_ceil(32)
    }
}
