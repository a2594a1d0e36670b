//! [`Selection`]: the entries that an indexer selects for each token.

use core::ops::Range;

use burn::{
    backend::Dispatch,
    tensor::{Bool, DType, Device, Int, Tensor, TensorData, activation},
};

use super::{
    Compression, SparseOps,
    sequence::{SCORES, joined, part, parts},
    span::span,
};
use crate::{Error, Result, error::invalid};

/// The entries that each token attends to. It is computed by one layer, and others may use it.
#[derive(Clone, Debug)]
pub struct Selection {
    pub(super) indices: Tensor<3, Int>,
}

impl Selection {
    /// Takes the numbers of the selected entries, `[batch, tokens, n]`, in any order; -1 where a
    /// token sees fewer than `n`, which is at most `top_k`.
    pub fn new(indices: Tensor<3, Int>) -> Self {
        Self { indices }
    }

    /// Selects nothing.
    pub(super) fn none(batch: usize, tokens: usize, device: &Device) -> Self {
        Self::new(Tensor::full([batch, tokens, 1], -1, (device, DType::I32)))
    }

    /// Returns the numbers of the selected entries, `[batch, tokens, n]` with `n` of at most
    /// `top_k`; -1 where a token sees fewer.
    pub fn indices(&self) -> &Tensor<3, Int> {
        &self.indices
    }
}

/// The inputs of an indexer for some tokens.
#[derive(Clone, Debug)]
pub struct IndexQuery {
    /// `[batch, index_heads, tokens, index_head_dim]`, after rope, and after the Hadamard transform
    /// if keys have one.
    pub query: Tensor<4>,
    /// The weight of each head, `[batch, tokens, index_heads]`. It may be negative.
    pub weights: Tensor<3>,
}

impl IndexQuery {
    /// Checks the shapes against keys of `width` channels.
    pub(super) fn check(&self, op: &'static str, width: usize) -> Result<()> {
        let [batch, heads, tokens, own_width] = self.query.dims();
        if own_width != width || self.query.dims().contains(&0) {
            let rule = format!("must have no empty axis, and the {width} channels of the keys");
            let shape = self.query.dims().to_vec();
            return Err(Error::Shape { op, tensor: "query", shape, rule });
        }
        if self.weights.dims() != [batch, tokens, heads] {
            let rule =
                format!("must be [batch, tokens, index_heads], [{batch}, {tokens}, {heads}]");
            let shape = self.weights.dims().to_vec();
            return Err(Error::Shape { op, tensor: "weights", shape, rule });
        }
        Ok(())
    }
}

/// Returns the score of every entry for every token, `sum_h weight_h * ReLU(query_h . key)`, f32
/// `[batch, tokens, entries]`, with gradients (DeepSeek-V3.2, 2025; DeepSeek-V4, 2026). All heads
/// read one key. Entries that a token does not see have scores, too.
///
/// # Shapes
/// - `keys`: `[batch, 1, entries, index_head_dim]`
///
/// # Errors
/// [`Error::Shape`] for a query that does not fit the keys.
pub fn index_scores(index: &IndexQuery, keys: &Tensor<4>) -> Result<Tensor<3>> {
    let ([batch, one, n, width], [_, heads, tokens, _]) = (keys.dims(), index.query.dims());
    index.check("index_scores", width)?;
    if one != 1 || n == 0 || batch != index.query.dims()[0] {
        let rule = format!("must be [{}, 1, keys, width] with a key", index.query.dims()[0]);
        let shape = keys.dims().to_vec();
        return Err(Error::Shape { op: "index_scores", tensor: "keys", shape, rule });
    }
    let keys = keys.clone().cast(DType::F32).swap_dims(2, 3); // [batch, 1, width, n]
    let rows = |tokens: Range<usize>| {
        let count = tokens.len();
        let query = part(&index.query, 2, tokens.clone()).cast(DType::F32);
        let weights = part(&index.weights, 1, tokens).cast(DType::F32);
        // One key serves all heads, so the queries of all heads are rows of one product.
        let dots = query.reshape([batch, 1, heads * count, width]).matmul(keys.clone());
        let dots = activation::relu(dots).reshape([batch, heads, count, n]);
        // [batch, count, heads] -> [batch, heads, count, 1]
        let weights = weights.swap_dims(1, 2).unsqueeze_dim::<4>(3);
        (dots * weights).sum_dim(1).reshape([batch, count, n])
    };
    Ok(joined(parts(tokens, SCORES / (heads * n), 1).map(rows).collect(), 1))
}

/// Selects for each token the `top_k` entries with the highest scores among those that it sees. Of
/// equal scores, the first entries win, and a NaN counts as the lowest score.
///
/// # Shapes
/// - `scores`: `[batch, tokens, entries]`, of tokens at positions `first..first + tokens`
///
/// # Errors
/// [`Error::InvalidConfig`] for a `top_k` of 0.
pub fn select_entries(
    scores: Tensor<3>,
    first: usize,
    compression: Compression,
    top_k: usize,
) -> Result<Selection> {
    if top_k == 0 {
        return Err(invalid("top_k", 0, "must be at least 1"));
    }
    let ([batch, tokens, n], device) = (scores.dims(), scores.device());
    let span = span(&vec![first; batch], &vec![tokens; batch], &device).into_dispatch();
    let scores = scores.detach().cast(DType::F32).into_dispatch();
    let selected = <Dispatch as SparseOps>::top_entries(scores, span, compression, top_k.min(n));
    Ok(Selection::new(Tensor::from_dispatch(selected)))
}

/// Returns which of `n` entries each token does not see, `[tokens, n]`.
pub(super) fn hidden_entries(
    first: usize,
    tokens: usize,
    n: usize,
    compression: Compression,
    device: &Device,
) -> Tensor<2, Bool> {
    let seen = (first..first + tokens).map(|t| compression.entries(t + 1) as i32);
    let seen = TensorData::new(seen.collect::<Vec<_>>(), [tokens, 1]);
    let seen = Tensor::<2, Int>::from_data(seen, (device, DType::I32));
    let entry = Tensor::<1, Int>::arange(0..n as i64, (device, DType::I32)).unsqueeze::<2>();
    entry.expand([tokens, n]).greater_equal(seen.expand([tokens, n]))
}
