//! Sparse attention of a whole sequence at once, with gradients.

use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData, activation};

use super::{Compression, Selection, select::hidden_entries};
use crate::{Error, Result, error::invalid};

/// Query rows that are computed together.
pub(super) const ROWS: usize = 64;

/// The compressed entries of a sequence, and which of them a token attends to.
#[derive(Clone, Copy, Debug)]
pub struct Compressed<'a> {
    /// `[batch, 1, entries, head_dim]`.
    pub entries: &'a Tensor<4>,
    /// The tokens that an entry stands for.
    pub compression: Compression,
    /// The selected entries, which the token must see; `None` for all that it sees.
    pub selection: Option<&'a Selection>,
}

/// The options of [`sparse_attention`].
#[derive(Clone, Debug)]
pub struct SparseOptions {
    /// Recent tokens that a query sees themselves, including its own.
    pub sliding_window: usize,
    /// The factor of scores; `None` for `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// The learned sink of each head, `[n_heads]`.
    pub sink_logits: Option<Tensor<1>>,
}

/// Attention of each token to recent tokens and to compressed entries, in one softmax, for a whole
/// sequence with gradients (DeepSeek-V4, 2026). One row serves as key and value of all heads.
///
/// # Shapes
/// - `query`: `[batch, n_heads, tokens, head_dim]`, after rope
/// - `rows`: `[batch, 1, tokens, head_dim]`, the tokens' own keys and values, after rope
/// - output: f32 `[batch, n_heads, tokens, head_dim]`
///
/// # Errors
/// [`Error::Shape`] for tensors that do not fit, and [`Error::InvalidConfig`] for a sliding window
/// of 0.
///
/// # Panics
/// Panics for a selection of an entry that does not exist, and may panic for one that the token
/// does not see.
pub fn sparse_attention(
    query: Tensor<4>,
    rows: &Tensor<4>,
    compressed: Option<Compressed<'_>>,
    options: &SparseOptions,
) -> Result<Tensor<4>> {
    check(&query, rows, compressed.as_ref(), options)?;
    let tokens = query.dims()[2];
    let blocks = Blocks::new(query, rows, compressed, options);
    let output = |first: usize| blocks.output(first, ROWS.min(tokens - first));
    Ok(Tensor::cat((0..tokens).step_by(ROWS).map(output).collect(), 2))
}

/// Sparse attention of some tokens at a time.
pub(super) struct Blocks<'a> {
    /// Scaled queries, f32.
    query: Tensor<4>,
    rows: Tensor<4>,
    compressed: Option<Compressed<'a>>,
    options: &'a SparseOptions,
}

impl<'a> Blocks<'a> {
    /// Takes checked arguments of [`sparse_attention`].
    pub(super) fn new(
        query: Tensor<4>,
        rows: &Tensor<4>,
        compressed: Option<Compressed<'a>>,
        options: &'a SparseOptions,
    ) -> Self {
        let scale = options.scale.unwrap_or(1.0 / (query.dims()[3] as f32).sqrt());
        let query = query.cast(DType::F32) * scale;
        Self { query, rows: rows.clone().cast(DType::F32), compressed, options }
    }

    fn output(&self, first: usize, count: usize) -> Tensor<4> {
        let (weights, values) = self.weights(first, count);
        let n = values.dims()[2];
        weights.narrow(3, 0, n).matmul(values)
    }

    /// Returns the number of entries that the tokens before `end` see.
    pub(super) fn seen(&self, end: usize) -> usize {
        self.compressed.map_or(0, |Compressed { entries, compression, .. }| {
            compression.entries(end).min(entries.dims()[2])
        })
    }

    /// Returns the weights of the entries that the last of these tokens sees, summed over heads,
    /// `[batch, count, entries]`.
    pub(super) fn entry_weights(&self, first: usize, count: usize) -> Tensor<3> {
        let n = self.seen(first + count);
        let (weights, values) = self.weights(first, count);
        let (batch, recent) = (weights.dims()[0], values.dims()[2] - n);
        weights.narrow(3, recent, n).sum_dim(1).reshape([batch, count, n])
    }

    /// Returns the softmax over recent tokens, entries and sinks for the tokens
    /// `first..first + count`, and the rows of recent tokens and entries.
    fn weights(&self, first: usize, count: usize) -> (Tensor<4>, Tensor<4>) {
        let Self { query, rows, compressed, options } = self;
        let ([batch, heads, ..], device) = (query.dims(), query.device());
        let (begin, end) = ((first + 1).saturating_sub(options.sliding_window), first + count);
        let query = query.clone().narrow(2, first, count);
        let seen = rows.clone().narrow(2, begin, end - begin);
        let scores = query.clone().matmul(seen.clone().swap_dims(2, 3));
        let hidden = outside(first..end, begin..end, options.sliding_window, &device);
        let mut scores = vec![scores.mask_fill(hidden.unsqueeze(), f32::NEG_INFINITY)];
        let mut values = vec![seen];
        let n = self.seen(end);
        if let Some(compressed) = compressed.filter(|_| n > 0) {
            let entries = compressed.entries.clone().narrow(2, 0, n).cast(DType::F32);
            let dots = query.matmul(entries.clone().swap_dims(2, 3));
            let hidden = match compressed.selection {
                None => hidden_entries(first, count, n, compressed.compression, &device)
                    .unsqueeze::<4>(),
                Some(selection) => {
                    let indices = selection.indices.clone().narrow(1, first, count);
                    unselected(indices, n).unsqueeze_dim::<4>(1)
                }
            };
            let dots = dots.mask_fill(hidden.expand([batch, heads, count, n]), f32::NEG_INFINITY);
            scores.push(dots);
            values.push(entries);
        }
        if let Some(sinks) = &options.sink_logits {
            let sinks = sinks.clone().cast(DType::F32).reshape([1, heads, 1, 1]);
            scores.push(sinks.expand([batch, heads, count, 1]));
        }
        (activation::softmax(Tensor::cat(scores, 3), 3), Tensor::cat(values, 2))
    }
}

/// Checks the arguments of [`sparse_attention`].
fn check(
    query: &Tensor<4>,
    rows: &Tensor<4>,
    compressed: Option<&Compressed<'_>>,
    options: &SparseOptions,
) -> Result<()> {
    let [batch, heads, tokens, width] = query.dims();
    let misfit = |tensor, shape: Vec<usize>, rule: String| {
        Err(Error::Shape { op: "sparse_attention", tensor, shape, rule })
    };
    if query.dims().contains(&0) {
        let rule = "must have no empty axis".to_string();
        return misfit("query", query.dims().to_vec(), rule);
    }
    if options.sliding_window == 0 {
        return Err(invalid("sliding_window", 0, "must be at least 1"));
    }
    if rows.dims() != [batch, 1, tokens, width] {
        let rule = format!("must be [{batch}, 1, {tokens}, {width}]");
        return misfit("rows", rows.dims().to_vec(), rule);
    }
    if let Some(logits) = options.sink_logits.as_ref().filter(|logits| logits.dims() != [heads]) {
        let rule = format!("must be [n_heads], [{heads}]");
        return misfit("sink_logits", logits.dims().to_vec(), rule);
    }
    let Some(Compressed { entries, selection, .. }) = compressed else { return Ok(()) };
    let n = entries.dims()[2];
    if n == 0 || entries.dims() != [batch, 1, n, width] {
        let rule = format!("must be [{batch}, 1, entries, {width}] with at least one entry");
        return misfit("entries", entries.dims().to_vec(), rule);
    }
    match selection.map(|selection| selection.indices().dims()) {
        Some(shape) if shape[..2] != [batch, tokens] || shape[2] == 0 => {
            let rule = format!("must be [{batch}, {tokens}, top_k]");
            misfit("selection", shape.to_vec(), rule)
        }
        _ => Ok(()),
    }
}

/// Returns which tokens of `keys` each token of `queries` does not see, `[queries, keys]`.
fn outside(
    queries: core::ops::Range<usize>,
    keys: core::ops::Range<usize>,
    sliding_window: usize,
    device: &Device,
) -> Tensor<2, Bool> {
    let shape = [queries.len(), keys.len()];
    let hidden = queries.flat_map(|t| keys.clone().map(move |k| k > t || t - k >= sliding_window));
    Tensor::from_data(TensorData::new(hidden.collect::<Vec<bool>>(), shape), device)
}

/// Returns which of `n` entries are not among `indices` `[batch, tokens, top_k]`, as
/// `[batch, tokens, n]`.
fn unselected(indices: Tensor<3, Int>, n: usize) -> Tensor<3, Bool> {
    let [batch, tokens, _] = indices.dims();
    let device = indices.device();
    // Column 0 stands for -1.
    let ones = Tensor::<3>::ones(indices.dims(), &device);
    let counts = Tensor::<3>::zeros([batch, tokens, n + 1], &device);
    let counts = counts.scatter(2, indices + 1, ones, burn::tensor::IndexingUpdateOp::Add);
    counts.narrow(2, 1, n).equal_elem(0.0)
}
