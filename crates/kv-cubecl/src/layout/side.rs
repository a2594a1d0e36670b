//! How each side of a cache is stored.

use core::ops::Range;

use super::PackedLayout;
use crate::formats::QuantSpec;

/// The layout of the tokens of one side of a cache, per (batch, kv head): sinks and the tokens of
/// its window are in float rows, the others are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SideLayout {
    /// Quantization of the tokens that leave the residual; `None` if all stay in float.
    pub spec: Option<QuantSpec>,
    /// Packed tokens that there is room for: all that are ever quantized, or the newest of them, in
    /// a ring, where a window hides the others.
    pub packed_tokens: usize,
    /// Float rows of sinks.
    pub sinks: usize,
    /// Slots of the ring of recent tokens; where nothing is quantized, all tokens that are seen
    /// after the sinks.
    pub ring: usize,
    /// The first element of this side's float rows among those of both sides.
    pub first_element: usize,
    /// Channels.
    pub head_dim: usize,
}

impl SideLayout {
    /// Fewest words of a tensor of packed tokens, because a kernel that reads four at once must not
    /// be given fewer.
    pub(crate) const FEWEST_WORDS: usize = 4;

    /// Float rows: sinks and ring.
    pub const fn rows(&self) -> usize {
        self.sinks + self.ring
    }

    /// Float row of `token` among those of its side, meaningful while the token is in float.
    pub const fn row(&self, token: usize) -> usize {
        if token < self.sinks { token } else { self.sinks + (token - self.sinks) % self.ring }
    }

    /// The first element of the float row of `token` among those of both sides.
    pub const fn element(&self, token: usize) -> usize {
        self.first_element + self.row(token) * self.head_dim
    }

    /// Returns the packed slot of the `token`th token after the sinks.
    pub const fn packed_slot(&self, token: usize) -> usize {
        token % self.packed_tokens
    }

    /// The slots of packed tokens, counted after the sinks: one run, or several where the ring
    /// starts again.
    pub(crate) fn packed_runs(&self, tokens: Range<usize>) -> Vec<Range<usize>> {
        let (mut runs, mut start) = (Vec::new(), tokens.start);
        while start < tokens.end {
            let slot = self.packed_slot(start);
            let len = (tokens.end - start).min(self.packed_tokens - slot);
            runs.push(slot..slot + len);
            start += len;
        }
        runs
    }

    /// Returns the layout of the words of packed tokens; `None` if all stay in float.
    pub fn packed(&self) -> Option<PackedLayout> {
        let Self { head_dim, packed_tokens: tokens, .. } = *self;
        self.spec.map(|spec| PackedLayout { spec, head_dim, tokens })
    }

    /// Packed words of one (batch, kv head) slice.
    pub fn slice_words(&self) -> usize {
        let words = self.packed_words(self.packed_tokens);
        // So that rows of codes begin at vectors of four words, in every slice.
        match self.spec.is_some_and(|spec| spec.packs_parameters()) {
            true => words.next_multiple_of(4),
            false => words,
        }
    }

    /// Words of `tokens` packed tokens of one (batch, kv head) slice.
    pub fn packed_words(&self, tokens: usize) -> usize {
        self.spec.map_or(0, |spec| spec.words(tokens, self.head_dim))
    }

    /// Words allocated for `slices` (batch, kv head) slices: at least four, more than the slices
    /// have where little or nothing is ever quantized, because a kernel that reads four at once
    /// must not be given fewer.
    pub fn words(&self, slices: usize) -> usize {
        (slices * self.slice_words()).max(Self::FEWEST_WORDS)
    }
}
