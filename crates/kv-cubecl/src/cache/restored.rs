//! Restores quantized tokens of a cache to floats, and counts the bytes.

use core::ops::Range;

use burn::tensor::Tensor;

use super::{KvCache, restored_bytes::RestoredBytes};
use crate::layout::{Side, Sides};

impl KvCache {
    /// Starts counting the bytes of float tensors that quantized keys and values are restored to:
    /// [`restored_bytes`](Self::restored_bytes). Off by default, and free until then.
    ///
    /// Clones of this cache, and copies of some of its sequences, made from now on count into the
    /// same numbers.
    pub fn count_restored(&mut self) {
        self.restored = RestoredBytes::counting();
    }

    /// Returns the bytes of float tensors that quantized keys and values were restored to since
    /// [`count_restored`](Self::count_restored), or `None` without that call.
    ///
    /// Decode restores none: attention reads codes in place, and a kernel or a CPU loop holds at
    /// most a tile of restored rows, which is no tensor. A chunk into a filled cache restores the
    /// few tokens that are quantized for some of its rows and in float for others.
    /// [`truncate`](Self::truncate) restores the tokens that return to float. Uses of
    /// [`packed`](Self::packed) outside of the cache are not counted.
    pub fn restored_bytes(&self) -> Option<Sides<usize>> {
        self.restored.read()
    }

    /// Restores packed tokens of one side. `tokens` are counted after the sinks, and begin at a
    /// block.
    pub(super) fn restore(&self, side: Side, tokens: Range<usize>) -> Option<Tensor<4>> {
        let place = self.layout.sides()[side].packed()?;
        // Tokens before them may share a word: they are restored too, and then left out.
        let alignment_tokens = place.spec.alignment_tokens(place.head_dim);
        let skipped = tokens.start % alignment_tokens;
        let all = tokens.start - skipped..tokens.end;
        let rows = self.state.packed(&self.layout, side, place.spec, all)?.dequantize();
        self.restored.add(side, || rows.shape().num_elements() * rows.dtype().size());
        Some(rows.narrow(2, skipped, tokens.len()))
    }
}
