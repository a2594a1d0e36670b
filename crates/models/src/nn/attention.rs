//! Attention heads, and where their keys and values are remembered.

use std::fmt;

use burn::tensor::{Int, Tensor};
use kv_cubecl::{
    AttentionOptions, FakeQuantOptions, KvCache, KvCacheConfig, streaming_attention_with,
};

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
    /// How scores became weights.
    pub options: AttentionOptions,
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
        fake_quant: FakeQuantOptions,
        /// How scores become weights.
        options: AttentionOptions,
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
            Self::Parallel { config, fake_quant, options, layer, observer } => {
                let seen = observer.map(|observe| (observe, [q.clone(), k.clone(), v.clone()]));
                let output =
                    streaming_attention_with(q, k, v, &config, fake_quant, options)?.output;
                if let Some((observe, [query, key, value])) = seen {
                    let output = output.clone();
                    observe(AttentionTrace { layer, query, key, value, output, options });
                }
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
            Self::Parallel { config, fake_quant, options, layer, .. } => f
                .debug_struct("Parallel")
                .field("config", config)
                .field("fake_quant", fake_quant)
                .field("options", options)
                .field("layer", layer)
                .finish_non_exhaustive(),
            Self::Cached(cache) => f.debug_tuple("Cached").field(cache).finish(),
            Self::At(cache, _) => f.debug_tuple("At").field(cache).finish_non_exhaustive(),
        }
    }
}
