//! How tokens are packed once they leave the residual: in groups of codes with a parameter word each.

use super::{minifloat::Minifloat, table::codecs};

macro_rules! codec_enum {
    ($($(#[$doc:meta])* $module:ident::$Codec:ident { $($formats:tt)* })+) => {
        /// The codecs of packed tokens: what the codes of a group and its parameter mean.
        ///
        /// How groups lie in tensors and words is the same for all ([`QuantSpec`]).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Codec {
            $($(#[$doc])* $Codec,)+
        }
    };
}

codecs!(codec_enum);

/// What is fixed in a format of packed tokens.
pub(super) struct CodecSpec {
    /// Bits of the parameter of a group.
    pub(super) parameter_bits: usize,
    /// The largest number that a code stands for, before its scale; `None` where code 0 does not stand for 0.
    pub(super) largest: Option<f32>,
    /// Numbers beyond it, infinite ones too, count as it, so that what is restored is finite.
    pub(super) limit: f32,
    /// What codes are, if they are floats.
    pub(super) float: Option<Minifloat>,
}

impl Codec {
    /// Bits of the parameter of a group.
    pub const fn parameter_bits(self) -> usize {
        self.codec_spec().parameter_bits
    }

    /// Whether code 0 stands for another number than 0.
    pub const fn has_offset(self) -> bool {
        self.largest().is_none()
    }

    /// The largest number that a code stands for, before its scale; `None` where code 0 does not stand for 0.
    pub const fn largest(self) -> Option<f32> {
        self.codec_spec().largest
    }

    /// Numbers beyond it, infinite ones too, count as it, so that what is restored is finite.
    pub const fn limit(self) -> f32 {
        self.codec_spec().limit
    }

    /// What codes are, if they are floats.
    pub(super) const fn float(self) -> Option<Minifloat> {
        self.codec_spec().float
    }
}

/// Which axis shares one parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// Groups of consecutive tokens within one channel: the keys of KIVI.
    PerChannel,
    /// Groups of consecutive channels within one token, or all of them: the values of KIVI.
    PerToken,
}

/// How a tensor `[.., tokens, head_dim]` is quantized, and where its words are.
///
/// Codes of 2, 4 and 8 bits lie in words one after the other, least significant bits first. 32
/// codes of 3 bits take three words: two with the low 2 bits of 16 codes each, like codes of 2
/// bits, then one with the high bits of all 32.
///
/// Tokens are packed in blocks of [`block_tokens`](Self::block_tokens) tokens, the fewest that hold
/// whole groups. A block has [`groups`](Self::groups) groups: the code words of all of them, then one
/// parameter word for each. The words of a group are next to one another per token; per channel, those of
/// neighboring channels are, so that word `j` of a group is `head_dim` words after word `j - 1`.
///
/// Tokens quantized per token whose [parameters](Codec::parameter_bits) are narrower than a word have them
/// [behind](Self::packs_parameters) the code words of all tokens of a slice, where those of neighboring groups and
/// tokens share words, least significant bits first. A word of parameters may then belong to several tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantSpec {
    /// What codes and parameters mean.
    pub format: Codec,
    /// Which axis is grouped.
    pub granularity: Granularity,
    /// Bits per code: 2, 3, 4 or 8.
    pub n_bits: u32,
    /// Elements per group.
    pub group_size: usize,
}

impl QuantSpec {
    /// Returns whether the high bit of each code is in a word apart from its low bits.
    pub const fn splits_codes(&self) -> bool {
        self.n_bits == 3
    }

    /// Returns the bits of a code that lie next to those of its neighbors: all of them, or the low
    /// 2 of 3.
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

    /// Returns which word of a group holds the low bits of the codes from `run *
    /// codes_per_word()` on.
    pub const fn low_word(&self, run: usize) -> usize {
        if self.splits_codes() { run / 2 * 3 + run % 2 } else { run }
    }

    /// Returns which word of a group holds the high bits of the codes in a word of
    /// [low bits](Self::low_word), and the bit of the first of them.
    pub const fn high_word(&self, run: usize) -> (usize, u32) {
        (run / 2 * 3 + 2, run as u32 % 2 * 16)
    }

    /// Returns code `index` of a group, given the words of its codes.
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

    /// Largest code, `2^n_bits - 1`.
    pub const fn max_code(&self) -> u32 {
        (1 << self.n_bits) - 1
    }

    /// Words of codes of one group.
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

    /// Words of one group whose parameter is a word of its own: its codes and its parameter.
    pub const fn words_per_group(&self) -> usize {
        self.code_words() + 1
    }

    /// Whether a code is at an end of the range: of the largest magnitude, or the lowest or highest of affine ones. Each
    /// group that is not constant has one; more are numbers that saturate or are as large.
    pub const fn is_extreme(&self, code: u32) -> bool {
        match self.format.float() {
            Some(float) => code & (float.sign - 1) == float.first_special - 1,
            None if self.format.has_offset() => code == 0 || code == self.max_code(),
            // Two's complement of 127 and -127.
            None => code == self.max_code() / 2 || code == self.max_code() / 2 + 2,
        }
    }

    /// Tokens that are quantized together: a group of them per channel, one per token.
    pub const fn block_tokens(&self) -> usize {
        match self.granularity {
            Granularity::PerChannel => self.group_size,
            Granularity::PerToken => 1,
        }
    }

    /// Number of groups in a block.
    pub const fn groups(&self, head_dim: usize) -> usize {
        match self.granularity {
            Granularity::PerChannel => head_dim,
            Granularity::PerToken => head_dim / self.group_size,
        }
    }

    /// Whether parameters share words, behind the codes of all tokens of a slice.
    pub const fn packs_parameters(&self) -> bool {
        matches!(self.granularity, Granularity::PerToken) && self.format.parameter_bits() < 32
    }

    /// Tokens at whose multiples packed tokens may be cut: no word belongs to tokens of both sides.
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

    /// Words of one (batch, head) slice of `tokens x head_dim` elements.
    pub const fn words(&self, tokens: usize, head_dim: usize) -> usize {
        let groups = tokens * head_dim / self.group_size;
        match self.packs_parameters() {
            true => groups * self.code_words() + self.parameter_words(tokens, head_dim),
            false => groups * self.words_per_group(),
        }
    }

    /// Words of the parameters of so many tokens, where these [share](Self::packs_parameters) words.
    pub const fn parameter_words(&self, tokens: usize, head_dim: usize) -> usize {
        (tokens * self.groups(head_dim) * self.format.parameter_bits()).div_ceil(32)
    }
}
