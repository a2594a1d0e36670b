//! [`SparseTrace`]: what a layer of sparse attention computed, for training and measurements.

use core::fmt;

use burn::tensor::{DType, Tensor, activation};

use super::{
    Compressed, Compression, Entries, IndexQuery, Selection, SparseConfig, SparseOptions,
    attention::Blocks,
    select::hidden_entries,
    sequence::{joined, part},
};
use crate::{Result, error::invalid, functions::store};

/// The inputs and the output of one layer of sparse attention in one call.
#[derive(Clone, Debug)]
pub struct SparseTrace {
    /// The configuration of the layer.
    pub config: SparseConfig,
    /// Queries after rope, `[batch, n_heads, tokens, head_dim]`.
    pub query: Tensor<4>,
    /// The tokens' rows after rope, before they are stored, `[batch, 1, tokens, head_dim]`.
    pub rows: Tensor<4>,
    /// The entries that the layer attends to, its own or another layer's.
    pub entries: Option<Entries>,
    /// The results of the layer's indexer, if the layer has one and the call is a whole sequence.
    pub index: Option<IndexTrace>,
    /// The learned sink of each head, `[n_heads]`.
    pub sink_logits: Option<Tensor<1>>,
    /// The output before rope is undone, f32 `[batch, n_heads, tokens, head_dim]`.
    pub output: Tensor<4>,
}

/// The inputs and results of an indexer for a whole sequence.
#[derive(Clone, Debug)]
pub struct IndexTrace {
    /// The queries and weights of its heads.
    pub query: IndexQuery,
    /// Its keys before they are stored, f32 `[batch, 1, entries, index_head_dim]`.
    pub keys: Tensor<4>,
    /// The scores of all entries with the keys as they are stored, `[batch, tokens, entries]`, with
    /// gradients.
    pub scores: Tensor<3>,
    /// The entries that it selected.
    pub selection: Selection,
}

/// Receives a [`SparseTrace`], and holds what is known before the layer attends.
pub(super) struct Observer<'a> {
    pub(super) observe: Box<dyn FnOnce(SparseTrace) + 'a>,
    pub(super) index: Option<IndexTrace>,
}

impl fmt::Debug for Observer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").field("index", &self.index).finish_non_exhaustive()
    }
}

impl SparseTrace {
    /// Returns the Kullback-Leibler divergence of the attention to entries from the indexer's
    /// softmax over its scores, in nats and summed over tokens, as `[1]`; `None` for a layer
    /// without an indexer, and for a sequence without entries. Indexers are trained by it
    /// (DeepSeek-V3.2, 2025, section 2.1).
    ///
    /// The target is the weight of each entry in the layer's softmax, summed over heads and
    /// normalized, if tokens attended to all entries that they see. Gradients flow to the scores
    /// only, so the layer does not learn to please its indexer.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) for a layer whose cache holds the
    /// entries, which has no gradients.
    pub fn index_loss(&self) -> Result<Option<Tensor<1>>> {
        let (Some(_), Some(compression)) = (self.config.index, self.config.compression) else {
            return Ok(None);
        };
        let Some(entries) = &self.entries else { return Ok(None) };
        if entries.is_cached() {
            let rule = "must be computed from a whole sequence; a cache has no gradients";
            return Err(invalid("index_loss", "of a cache", rule));
        }
        let (Some(index), Some(entries)) = (&self.index, entries.tensor()) else { return Ok(None) };
        let detached = |tensor: &Tensor<4>| tensor.clone().detach();
        let entries = detached(entries);
        let options = SparseOptions {
            sliding_window: self.config.sliding_window,
            scale: None,
            sink_logits: self.sink_logits.clone().map(Tensor::detach),
        };
        let compressed = Compressed { entries: &entries, compression, selection: None };
        let rows = store(detached(&self.rows), self.config.float);
        let query = detached(&self.query);
        let blocks = Blocks::new(query, &rows, Some(compressed), &options);
        let divergence = |tokens: core::ops::Range<usize>| {
            // Tokens that see no entry add nothing.
            blocks.entry_weights(tokens.clone()).map(|target| {
                let scores = part(&index.scores, 1, tokens.clone());
                let scores = part(&scores, 2, 0..target.dims()[2]);
                kl_of_block(target, scores, tokens.start, compression)
            })
        };
        let sums: Vec<_> = blocks.parts().filter_map(divergence).collect();
        Ok((!sums.is_empty()).then(|| joined(sums, 0).sum()))
    }
}

/// Returns the summed divergence of `target` from the softmax of `scores`, both
/// `[batch, count, n]`, of tokens from position `first` on.
fn kl_of_block(
    target: Tensor<3>,
    scores: Tensor<3>,
    first: usize,
    compression: Compression,
) -> Tensor<1> {
    /// Stands for negative infinity, whose product with a weight of 0 would be NaN.
    const HIDDEN: f32 = -1e30;
    /// Keeps logarithms and quotients of 0 finite; the terms are 0.
    const TINY: f32 = 1e-30;
    let ([_, count, n], device) = (scores.dims(), scores.device());
    let hidden = hidden_entries(first, count, n, compression, &device).unsqueeze::<3>();
    let scores = scores.cast(DType::F32);
    let scores = scores.clone().mask_fill(hidden.expand(scores.dims()), HIDDEN);
    // A token that sees no entry has target 0 everywhere, so it adds nothing.
    let target = target.clone() / target.sum_dim(2).clamp_min(TINY);
    let ratio = target.clone().clamp_min(TINY).log() - activation::log_softmax(scores, 2);
    (target * ratio).sum()
}
