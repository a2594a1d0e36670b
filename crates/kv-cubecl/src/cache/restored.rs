//! Quantized tokens of a cache as floats again, and how many bytes of them there were.

use core::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};
use std::sync::Arc;

use burn::tensor::Tensor;

use super::KvCache;
use crate::layout::{Side, Sides};

/// Bytes of keys and of values; `None` where nobody counts. Clones count into the same numbers.
#[derive(Clone, Debug, Default)]
pub(super) struct RestoredBytes(Option<Arc<[AtomicUsize; 2]>>);

impl KvCache {
    /// Counts from now on how many bytes of quantized keys and values become tensors of floats
    /// again ([`restored_bytes`](Self::restored_bytes)). It is off before, and costs nothing then.
    ///
    /// Clones and copies of some sequences that are made of this cache from now on count into the
    /// same numbers.
    pub fn count_restored(&mut self) {
        self.restored = RestoredBytes(Some(Arc::default()));
    }

    /// Bytes of the float tensors that quantized keys and values were restored to since
    /// [`count_restored`](Self::count_restored), or `None` without it.
    ///
    /// A token that is appended alone restores none: attention reads codes where they lie, and what
    /// a kernel or a loop of the CPU makes of them on the way, a tile at most, is no tensor. A
    /// chunk into a filled cache restores the few tokens whose form its rows see change, and
    /// [`truncate`](Self::truncate) those that are in float again. What is done with
    /// [`packed`](Self::packed) outside of the cache is not counted.
    pub fn restored_bytes(&self) -> Option<Sides<usize>> {
        let [keys, values] = self.restored.0.as_deref()?;
        Some(Sides { keys: keys.load(Relaxed), values: values.load(Relaxed) })
    }

    /// Packed tokens of one side, restored; `tokens` are counted after the sinks, and begin at a
    /// block_tokens.
    pub(super) fn restore(&self, side: Side, tokens: Range<usize>) -> Option<Tensor<4>> {
        let place = self.layout.sides()[side].packed()?;
        // Tokens before them that share a word are restored, too, and left out.
        let alignment_tokens = place.spec.alignment_tokens(place.head_dim);
        let skipped = tokens.start % alignment_tokens;
        let all = tokens.start - skipped..tokens.end;
        let rows = self.state.packed(&self.layout, side, place.spec, all)?.dequantize();
        if let Some(counts) = &self.restored.0 {
            let bytes = rows.shape().num_elements() * rows.dtype().size();
            counts[side as usize].fetch_add(bytes, Relaxed);
        }
        Some(rows.narrow(2, skipped, tokens.len()))
    }
}
