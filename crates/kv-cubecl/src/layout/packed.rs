//! Where the codes and parameters of packed tokens are.

use super::QuantSpec;

/// The words of the packed tokens of one (batch, kv head): how many tokens there is room for, and
/// how they are quantized. Tokens are counted by their slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackedLayout {
    /// Quantization of the tokens.
    pub spec: QuantSpec,
    /// Channels.
    pub head_dim: usize,
    /// Tokens that there is room for.
    pub tokens: usize,
}

impl PackedLayout {
    /// All words.
    pub const fn words(&self) -> usize {
        self.spec.words(self.tokens, self.head_dim)
    }

    /// The first word of the codes of `token`, the first of a block.
    pub const fn codes(&self, token: usize) -> usize {
        match self.spec.packs_parameters() {
            true => token * self.spec.words_of_codes(self.head_dim),
            false => self.spec.words(token, self.head_dim),
        }
    }

    /// The first word of the parameters of all tokens, where these share words.
    pub const fn parameters(&self) -> usize {
        self.tokens * self.spec.words_of_codes(self.head_dim)
    }

    /// Returns the place of the parameter of a group of `token` if parameters share words: its
    /// word, and its lowest bit.
    pub const fn parameter(&self, token: usize, group: usize) -> (usize, u32) {
        let bits = self.spec.format.parameter_bits();
        let bit = (token * self.spec.groups(self.head_dim) + group) * bits;
        (self.parameters() + bit / 32, (bit % 32) as u32)
    }

    /// Returns the parameter at this [place](Self::parameter).
    #[cfg(feature = "flex")]
    #[inline(always)]
    pub(crate) fn parameter_in(&self, words: &[u32], token: usize, group: usize) -> u32 {
        let (word, shift) = self.parameter(token, group);
        words[word] >> shift & self.parameter_mask()
    }

    /// Writes the parameter at this [place](Self::parameter).
    #[cfg(feature = "flex")]
    #[inline(always)]
    pub(crate) fn set_parameter(&self, words: &mut [u32], token: usize, group: usize, to: u32) {
        let (word, shift) = self.parameter(token, group);
        words[word] = words[word] & !(self.parameter_mask() << shift) | to << shift;
    }

    #[cfg(feature = "flex")]
    fn parameter_mask(&self) -> u32 {
        ((1u64 << self.spec.format.parameter_bits()) - 1) as u32
    }
}
