//! Attention heads, and where their keys and values are remembered.

use std::fmt;

use burn::tensor::{Int, Tensor};
use kv_cubecl::{FakeQuantOptions, KvCache, KvCacheConfig, streaming_attention_with};

use super::Rotation;
use crate::Result;

/// The inputs and the output of one layer's attention.
#[derive(Clone, Debug)]
pub struct AttentionTrace {
    /// The layer, counted from 0.
    pub layer: usize,
    /// Queries after the rotary encoding, `[batch, n_heads, seq, head_dim]`.
    pub query: Tensor<4>,
    /// Keys after the rotary encoding, `[batch, n_kv_heads, seq, head_dim]`.
    pub key: Tensor<4>,
    /// Values, `[batch, n_kv_heads, seq, head_dim]`.
    pub value: Tensor<4>,
    /// Attention before the heads are joined, `[batch, n_heads, seq, head_dim]`.
    pub output: Tensor<4>,
}

/// A callback that is given every layer's attention, first layer first.
pub type AttentionObserver<'a> = dyn FnMut(AttentionTrace) + 'a;

/// Where one layer's attention finds the keys and values of earlier tokens.
pub enum KvMemory<'a> {
    /// There are no earlier tokens: the whole sequence is passed at once, and what a cache of this
    /// configuration would give token by token is computed in parallel. Differentiable.
    Parallel {
        /// The configuration of the cache.
        config: KvCacheConfig,
        /// How training treats the quantizer.
        options: FakeQuantOptions,
        /// The layer's index, for the observer.
        layer: usize,
        /// Is called with the attention's inputs and output.
        observer: Option<&'a mut AttentionObserver<'a>>,
    },
    /// In this cache, which grows by the tokens of the call.
    Cached(&'a mut KvCache),
    /// In this cache, which grows by one token at the given position, `[1]` i32; see
    /// [`KvCache::attend_at`].
    At(&'a mut KvCache, &'a Tensor<1, Int>),
}

impl KvMemory<'_> {
    /// Causal attention of the given tokens over the earlier ones and themselves.
    ///
    /// # Shapes
    ///
    /// - q: `[batch, n_heads, seq, head_dim]`
    /// - k, v: `[batch, n_kv_heads, seq, head_dim]`, k after the rotary encoding
    /// - output: `[batch, n_heads, seq, head_dim]`
    ///
    /// # Errors
    ///
    /// Those of the cache: a configuration that does not fit the head, no room left.
    pub fn attend(self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Result<Tensor<4>> {
        Ok(match self {
            Self::Parallel { config, options, observer: None, .. } => {
                streaming_attention_with(q, k, v, &config, options, Default::default())?.output
            }
            Self::Parallel { config, options, layer, observer: Some(observe) } => {
                let (query, key, value) = (q.clone(), k.clone(), v.clone());
                let output =
                    streaming_attention_with(q, k, v, &config, options, Default::default())?.output;
                observe(AttentionTrace { layer, query, key, value, output: output.clone() });
                output
            }
            Self::Cached(cache) => cache.attend(q, k, v)?.output,
            Self::At(cache, position) => cache.attend_at(q, k, v, position)?.output,
        })
    }
}

impl fmt::Debug for KvMemory<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Parallel { config, options, layer, .. } => f
                .debug_struct("Parallel")
                .field("config", config)
                .field("options", options)
                .field("layer", layer)
                .finish_non_exhaustive(),
            Self::Cached(cache) => f.debug_tuple("Cached").field(cache).finish(),
            Self::At(cache, _) => f.debug_tuple("At").field(cache).finish_non_exhaustive(),
        }
    }
}

/// How a fused QKV projection is cut into heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; a divisor of `n_heads`.
    pub n_kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
}

impl AttentionShape {
    /// Rows of the fused projection: query heads, key heads, value heads.
    pub fn qkv_rows(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }

    /// Cuts `qkv` into heads, rotates queries and keys, attends, and joins the heads again.
    ///
    /// # Shapes
    ///
    /// - qkv: `[batch, seq, (n_heads + 2 * n_kv_heads) * head_dim]`
    /// - output: `[batch, seq, n_heads * head_dim]`
    ///
    /// # Errors
    ///
    /// Those of [`KvMemory::attend`].
    pub fn attend(
        &self,
        qkv: Tensor<3>,
        rotation: Option<&Rotation>,
        memory: KvMemory<'_>,
    ) -> Result<Tensor<3>> {
        let Self { n_heads, n_kv_heads, head_dim } = *self;
        let [batch, seq, _] = qkv.dims();

        // [batch, seq, heads, head_dim] -> [batch, heads, seq, head_dim]
        let heads = qkv.reshape([batch, seq, n_heads + 2 * n_kv_heads, head_dim]).swap_dims(1, 2);
        let v = heads.clone().narrow(1, n_heads + n_kv_heads, n_kv_heads);
        let qk = heads.narrow(1, 0, n_heads + n_kv_heads);
        let qk = match rotation {
            Some(rotation) => rotation.apply(qk),
            None => qk,
        };
        let q = qk.clone().narrow(1, 0, n_heads);
        let k = qk.narrow(1, n_heads, n_kv_heads);

        let out = memory.attend(q, k, v)?; // [batch, n_heads, seq, head_dim]
        Ok(out.swap_dims(1, 2).reshape([batch, seq, n_heads * head_dim]))
    }
}
