//! [`RowLayout`]: the place of every row in a store.

use super::RowFormat;
use crate::layout::PackedLayout;

/// The layout of a store of rows: a ring of `slots` rows for each sequence, in two tensors.
///
/// Codes are u32 words of one axis: one [`PackedLayout`] for each sequence. Channels without codes
/// are `[batch, slots, channels]` in their float type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "remote", derive(serde::Serialize, serde::Deserialize))]
pub struct RowLayout {
    /// Sequences.
    pub batch: usize,
    /// Rows of each sequence. Row `i` is in slot `i % slots`.
    pub slots: usize,
    /// Channels of a row.
    pub width: usize,
    /// The storage of a row.
    pub format: RowFormat,
}

impl RowLayout {
    /// Returns where the codes of a sequence are; `None` without codes.
    pub const fn packed(&self) -> Option<PackedLayout> {
        match self.format.spec(self.width) {
            Some(spec) => {
                let head_dim = self.format.coded_channels(self.width);
                Some(PackedLayout { spec, head_dim, tokens: self.slots })
            }
            None => None,
        }
    }

    /// Returns the number of code words of a sequence. Sequences begin at vectors of four words.
    pub const fn sequence_words(&self) -> usize {
        match self.packed() {
            Some(packed) => packed.words().next_multiple_of(4),
            None => 0,
        }
    }

    /// Returns the number of code words of all sequences: at least four, because no tensor is
    /// empty.
    pub const fn words(&self) -> usize {
        match self.batch * self.sequence_words() {
            0 => 4,
            words => words,
        }
    }

    /// Returns the number of channels without codes.
    pub const fn floats(&self) -> usize {
        self.width - self.format.coded_channels(self.width)
    }

    /// Returns the shape of the tensor of channels without codes. No tensor is empty.
    pub const fn float_shape(&self) -> [usize; 3] {
        match self.floats() {
            0 => [self.batch, 1, 1],
            floats => [self.batch, self.slots, floats],
        }
    }

    /// Returns the bytes of both tensors.
    pub fn bytes(&self) -> usize {
        let floats: usize = self.float_shape().iter().product();
        4 * self.words() + self.format.float.size() * floats
    }
}
