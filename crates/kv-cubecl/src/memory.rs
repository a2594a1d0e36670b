//! [`KvMemory`]: a layer's access to earlier tokens.

use burn::tensor::{Int, Tensor};

use crate::{
    Attention, AttentionOptions, Drafted, Error, FakeQuantOptions, KvCache, KvCacheConfig, Result,
    RopeTable, functions::shared_values, streaming_attention_latent, streaming_attention_with,
    streaming_attention_with_sinks,
};

/// The access of one layer's attention to the keys and values of earlier tokens. With it, the same
/// code of a layer serves training, evaluation and streaming.
#[derive(Debug)]
#[non_exhaustive]
pub enum KvMemory<'a> {
    /// Computes the whole sequence in parallel, by the closed form of a cache of this kind.
    /// Differentiable.
    Parallel {
        /// The cache.
        config: KvCacheConfig,
        /// Options of the quantizer in training.
        fake_quant: FakeQuantOptions,
        /// Options of the softmax.
        options: AttentionOptions,
    },
    /// Appends the tokens of the call to this cache.
    Cached(&'a mut KvCache),
    /// A cache and the number of tokens of the call for each sequence; see
    /// [`KvCache::attend_ragged`].
    Ragged(&'a mut KvCache, &'a [usize]),
    /// Appends one token at this position to this cache; see [`KvCache::attend_at`].
    At(&'a mut KvCache, &'a Tensor<1, Int>),
}

/// The keys and values of one pass that layers without a cache of their own attend to, too; see
/// [`KvMemory::attend_and_share`].
#[derive(Clone, Debug)]
pub struct SharedKv {
    /// `[batch, n_kv_heads, tokens, head_dim]`.
    key: Tensor<4>,
    value: Tensor<4>,
    /// True if the cache does not hold the tokens yet.
    postponed: bool,
}

impl SharedKv {
    /// Describes one token per sequence that a step has appended to the cache.
    pub fn appended(key: Tensor<4>, value: Tensor<4>) -> Self {
        Self { key, value, postponed: false }
    }

    /// Returns the tokens for [`KvCache::keep`], if the cache does not hold them yet.
    pub fn drafted(self) -> Drafted {
        Drafted::postponed(self.key, self.value)
    }

    /// Returns the keys and values of the call.
    pub fn key_value(&self) -> (&Tensor<4>, &Tensor<4>) {
        (&self.key, &self.value)
    }
}

impl KvMemory<'_> {
    /// [`Parallel`](Self::Parallel) with the defaults of its options.
    pub fn parallel(config: KvCacheConfig) -> Self {
        let (fake_quant, options) = (FakeQuantOptions::default(), AttentionOptions::default());
        Self::Parallel { config, fake_quant, options }
    }

    /// Causal attention over the remembered tokens and these.
    ///
    /// # Shapes
    /// - `query`: `[batch, n_heads, tokens, head_dim]`
    /// - `key`, `value`: `[batch, n_kv_heads, tokens, head_dim]`, keys after the position encoding
    /// - output: the shape of `query`
    ///
    /// # Errors
    /// Fails as [`streaming_attention_with`], [`KvCache::attend`], [`KvCache::attend_ragged`] and
    /// [`KvCache::attend_at`] do.
    pub fn attend(self, query: Tensor<4>, key: Tensor<4>, value: Tensor<4>) -> Result<Attention> {
        self.attend_with_sinks(query, key, value, None)
    }

    /// [`attend`](Self::attend) where a value is the first `value_dim` channels of its key: see
    /// [`CacheShape::with_shared_values`](crate::CacheShape::with_shared_values).
    ///
    /// # Errors
    /// Fails as [`attend`](Self::attend) and [`streaming_attention_latent`] do, and with
    /// [`Error::Unsupported`] for a cache of another shape.
    pub fn attend_latent(
        self,
        query: Tensor<4>,
        key: Tensor<4>,
        value_dim: usize,
    ) -> Result<Attention> {
        let shape = match &self {
            Self::Parallel { config, fake_quant, options } => {
                return streaming_attention_latent(
                    query,
                    key,
                    value_dim,
                    config,
                    *fake_quant,
                    *options,
                );
            }
            Self::Cached(cache) | Self::Ragged(cache, _) | Self::At(cache, _) => {
                cache.layout().shape()
            }
        };
        if !shape.shares_values {
            return Err(Error::Unsupported {
                what: format!("attend_latent with a cache of {shape}"),
                why: "the cache stores values separately; create it with \
                      CacheShape::with_shared_values"
                    .to_string(),
            });
        }
        let value = shared_values(&key, value_dim)?;
        self.attend(query, key, value)
    }

    /// [`attend`](Self::attend) with a learned sink of each head, `[n_heads]`, if the model has
    /// them: see [`streaming_attention_with_sinks`].
    ///
    /// # Errors
    /// Fails as [`attend`](Self::attend) does, and with [`Error::Shape`](crate::Error::Shape) for
    /// another number of logits than query heads.
    pub fn attend_with_sinks(
        self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
        sink_logits: Option<Tensor<1>>,
    ) -> Result<Attention> {
        let attention = match self {
            Self::Parallel { config, fake_quant, options } => {
                return match sink_logits {
                    Some(sink_logits) => streaming_attention_with_sinks(
                        query,
                        key,
                        value,
                        sink_logits,
                        &config,
                        fake_quant,
                        options,
                    ),
                    None => {
                        streaming_attention_with(query, key, value, &config, fake_quant, options)
                    }
                };
            }
            Self::Cached(cache) => cache.attend(query, key, value)?,
            Self::Ragged(cache, tokens) => cache.attend_ragged(query, key, value, tokens)?,
            Self::At(cache, position) => cache.attend_at(query, key, value, position)?,
        };
        with_sinks(attention, sink_logits)
    }

    /// [`attend_with_sinks`](Self::attend_with_sinks) for the layer that owns the cache, if other
    /// layers attend to the same tokens with [`attend_shared`](Self::attend_shared). A chunk is not
    /// appended to the cache before [`append_shared`](Self::append_shared), because each row of the
    /// other layers' queries must see what the same row of this query sees.
    ///
    /// # Errors
    /// Fails as [`attend_with_sinks`](Self::attend_with_sinks) does.
    pub fn attend_and_share(
        self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
        sink_logits: Option<Tensor<1>>,
    ) -> Result<(Attention, SharedKv)> {
        let mut shared = SharedKv::appended(key.clone(), value.clone());
        let attention = match self {
            Self::Cached(cache) if key.dims()[2] > 1 => {
                shared.postponed = true;
                cache.peek(query, key, value)?
            }
            Self::Ragged(cache, tokens) if tokens.iter().any(|&n| n > 1) => {
                shared.postponed = true;
                cache.peek_ragged(query, key, value, tokens)?
            }
            other => {
                return Ok((other.attend_with_sinks(query, key, value, sink_logits)?, shared));
            }
        };
        Ok((with_sinks(attention, sink_logits)?, shared))
    }

    /// Attends to the tokens that another layer shared in the same pass. Each row sees what the row
    /// of the owner's query saw. `self` is the owner's memory.
    ///
    /// # Shapes
    /// - `query`: `[batch, n_heads, tokens, head_dim]`
    /// - output: the shape of `query`
    ///
    /// # Errors
    /// Fails as [`attend_with_sinks`](Self::attend_with_sinks) does.
    pub fn attend_shared(
        self,
        query: Tensor<4>,
        shared: &SharedKv,
        sink_logits: Option<Tensor<1>>,
    ) -> Result<Attention> {
        let (key, value) = (shared.key.clone(), shared.value.clone());
        let attention = match self {
            Self::Parallel { .. } => {
                return self.attend_with_sinks(query, key, value, sink_logits);
            }
            Self::Cached(cache) if shared.postponed => cache.peek(query, key, value)?,
            Self::Cached(cache) => cache.attend_last(query)?,
            Self::Ragged(cache, tokens) if shared.postponed => {
                cache.peek_ragged(query, key, value, tokens)?
            }
            Self::Ragged(cache, tokens) => cache.attend_last_ragged(query, tokens)?,
            Self::At(cache, position) => cache.attend_last_at(query, position)?,
        };
        with_sinks(attention, sink_logits)
    }

    /// [`attend_with_sinks`](Self::attend_with_sinks) with tokens that [`KvCache::keep`] may remove
    /// again.
    ///
    /// # Errors
    /// Fails as [`KvCache::draft`] does, and with [`Error::Unsupported`] without a cache, or at a
    /// position on the device.
    pub fn draft(
        self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
        sink_logits: Option<Tensor<1>>,
    ) -> Result<(Attention, Drafted)> {
        let (attention, drafted) = match self {
            Self::Cached(cache) => {
                let tokens = vec![key.dims()[2]; cache.lens().len()];
                cache.draft(query, key, value, &tokens)?
            }
            Self::Ragged(cache, tokens) => cache.draft(query, key, value, tokens)?,
            Self::Parallel { .. } | Self::At(..) => {
                let what = "a draft of a sequence or at a position on the device".to_string();
                let why = "its tokens could not be removed; use a cache".to_string();
                return Err(Error::Unsupported { what, why });
            }
        };
        Ok((with_sinks(attention, sink_logits)?, drafted))
    }

    /// Appends the tokens of a chunk that [`attend_and_share`](Self::attend_and_share) has not
    /// appended. Call it once, after the last layer has attended.
    ///
    /// # Errors
    /// Fails as [`KvCache::append`] and [`KvCache::append_ragged`] do.
    pub fn append_shared(self, shared: SharedKv) -> Result<()> {
        let SharedKv { key, value, postponed } = shared;
        match self {
            Self::Cached(cache) if postponed => cache.append(key, value),
            Self::Ragged(cache, tokens) if postponed => cache.append_ragged(key, value, tokens),
            _ => Ok(()),
        }
    }

    /// Returns whether [`attend_with_rope`](Self::attend_with_rope) accepts one token here.
    pub fn applies_rope(&self) -> bool {
        match self {
            Self::Cached(cache) | Self::At(cache, _) => !cache.layout().shape().shares_values,
            Self::Parallel { .. } | Self::Ragged(..) => false,
        }
    }

    /// [`attend_with_sinks`](Self::attend_with_sinks) for one token whose query and key come before
    /// the position encoding; rope is applied in the launches of the step.
    ///
    /// # Errors
    /// Fails as [`KvCache::attend_with_rope`] and [`KvCache::attend_at_with_rope`] do, and with
    /// [`Error::Unsupported`] for a memory that does not [apply rope](Self::applies_rope).
    pub fn attend_with_rope(
        self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
        rope: &RopeTable,
        sink_logits: Option<Tensor<1>>,
    ) -> Result<Attention> {
        let attention = match self {
            Self::Cached(cache) => cache.attend_with_rope(query, key, value, rope)?,
            Self::At(cache, position) => {
                cache.attend_at_with_rope(query, key, value, position, rope)?
            }
            Self::Parallel { .. } | Self::Ragged(..) => {
                let what = "attend_with_rope of a sequence or of ragged ones".to_string();
                let why = "apply rope to query and key first, then call attend".to_string();
                return Err(Error::Unsupported { what, why });
            }
        };
        with_sinks(attention, sink_logits)
    }
}

fn with_sinks(attention: Attention, sink_logits: Option<Tensor<1>>) -> Result<Attention> {
    match sink_logits {
        Some(sink_logits) => attention.with_sinks(sink_logits),
        None => Ok(attention),
    }
}
