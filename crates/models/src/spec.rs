//! What a model is, layer by layer: what its caches are made from, and what evaluation and training
//! ask of it.

use burn::tensor::Tensor;
use kv_cubecl::{AttentionOptions, CacheShape, Sides};

use crate::{
    Result,
    nn::{Memory, Rope, Rotation},
};

/// The attention of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct LayerSpec {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; a divisor of `n_heads`.
    pub n_kv_heads: usize,
    /// Channels per head, of queries and keys, and of values.
    pub head_dim: Sides<usize>,
    /// How scores become weights.
    pub options: AttentionOptions,
}

impl LayerSpec {
    /// `n_heads` query heads over `n_kv_heads` key and value heads of `head_dim` channels, one number or
    /// one for keys and one for values, whose scores are scaled by `1 / sqrt(head_dim)`.
    pub fn new(n_heads: usize, n_kv_heads: usize, head_dim: impl Into<Sides<usize>>) -> Self {
        let (head_dim, options) = (head_dim.into(), AttentionOptions::default());
        Self { n_heads, n_kv_heads, head_dim, options }
    }

    /// The same layer with other options.
    #[must_use]
    pub fn with_options(self, options: AttentionOptions) -> Self {
        Self { options, ..self }
    }

    /// What the layer's cache holds for `batch` sequences.
    pub fn cache_shape(&self, batch: usize) -> CacheShape {
        let Self { n_kv_heads, head_dim, .. } = *self;
        CacheShape::new(batch, n_kv_heads, head_dim)
    }

    /// Rows of a fused QKV projection: query heads, key heads, value heads.
    pub fn qkv_rows(&self) -> usize {
        (self.n_heads + self.n_kv_heads) * self.head_dim.keys
            + self.n_kv_heads * self.head_dim.values
    }

    /// Cuts `qkv` into heads, rotates queries and keys, attends, and joins the heads again.
    ///
    /// # Shapes
    ///
    /// - qkv: `[batch, seq, qkv_rows]`: queries, keys, values, head by head
    /// - output: `[batch, seq, n_heads * head_dim]`, with the head_dim of values
    ///
    /// # Errors
    ///
    /// Those of [`Memory::attend`].
    pub fn attend(
        &self,
        qkv: Tensor<3>,
        rotation: Option<&Rotation>,
        memory: Memory<'_>,
    ) -> Result<Tensor<3>> {
        let Self { n_heads, n_kv_heads, head_dim, .. } = *self;
        let [batch, seq, _] = qkv.dims();

        // [batch, seq, heads, head_dim] -> [batch, heads, seq, head_dim]
        let heads = |part: Tensor<3>, heads, head_dim| {
            part.reshape([batch, seq, heads, head_dim]).swap_dims(1, 2)
        };
        let n_qk = n_heads + n_kv_heads;
        let (qk, v) = if head_dim.keys == head_dim.values {
            // Views of the projection. Parts of its rows, as below, are copied.
            let all = heads(qkv, n_qk + n_kv_heads, head_dim.keys);
            (all.clone().narrow(1, 0, n_qk), all.narrow(1, n_qk, n_kv_heads))
        } else {
            let (qk_rows, v_rows) = (n_qk * head_dim.keys, n_kv_heads * head_dim.values);
            let v = qkv.clone().narrow(2, qk_rows, v_rows);
            let qk = qkv.narrow(2, 0, qk_rows);
            (heads(qk, n_qk, head_dim.keys), heads(v, n_kv_heads, head_dim.values))
        };
        let qk = match rotation {
            Some(rotation) => rotation.apply(qk),
            None => qk,
        };
        let q = qk.clone().narrow(1, 0, n_heads);
        let k = qk.narrow(1, n_heads, n_kv_heads);

        let out = memory.attend(q, k, v)?; // [batch, n_heads, seq, head_dim]
        Ok(out.swap_dims(1, 2).reshape([batch, seq, n_heads * head_dim.values]))
    }
}

/// A decoder-only model as its caches, evaluation and training see it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ModelSpec {
    /// Tokens the model knows.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// The longest context, in tokens.
    pub max_positions: usize,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// The rotary encoding of queries and keys; `None` for a model without one.
    pub rope: Option<Rope>,
}

impl ModelSpec {
    /// A model of `n_layers` layers that are all like `layer`, without rotary positions.
    pub fn uniform(
        vocab_size: usize,
        hidden_size: usize,
        max_positions: usize,
        n_layers: usize,
        layer: LayerSpec,
    ) -> Self {
        let layers = vec![layer; n_layers];
        Self { vocab_size, hidden_size, max_positions, layers, rope: None }
    }

    /// The same model with rotary positions.
    #[must_use]
    pub fn with_rope(self, rope: Rope) -> Self {
        Self { rope: Some(rope), ..self }
    }
}

impl AsRef<Self> for ModelSpec {
    fn as_ref(&self) -> &Self {
        self
    }
}
