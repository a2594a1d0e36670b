//! One type for all models.

use burn::{
    module::Module,
    tensor::{Device, Int, Tensor},
};
use kv_cubecl::{CacheShape, FakeQuantOptions};

use crate::{
    ModelCache, ModelCacheConfig, Result,
    cache::check_context,
    gpt2::Gpt2,
    llama::Llama,
    nn::{AttentionObserver, AttentionShape, Pass},
};

/// A decoder-only language model whose KV cache is a parameter.
#[derive(Module, Debug)]
pub enum LanguageModel {
    /// GPT-2.
    Gpt2(Gpt2),
    /// The Llama family.
    Llama(Llama),
}

impl LanguageModel {
    /// Logits of a whole sequence, computed in parallel as a cache of `config` would have
    /// produced them token by token. Differentiable.
    ///
    /// Rotary frequencies that depend on the context length
    /// ([`RopeScaling::LongRope`](crate::nn::RopeScaling::LongRope)) are chosen by the capacity in
    /// `config`, as in such a cache, or by the sequence if it is longer.
    ///
    /// # Shapes
    ///
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, vocab]`
    ///
    /// # Errors
    ///
    /// No token, more tokens than [`max_positions`](Self::max_positions), or a `config` that does
    /// not fit the model.
    pub fn forward(
        &self,
        ids: Tensor<2, Int>,
        config: impl Into<ModelCacheConfig>,
    ) -> Result<Tensor<3>> {
        Ok(self.head(self.hidden(ids, config)?))
    }

    /// Appends any number of tokens to `cache` and returns the logits after each of them.
    ///
    /// # Shapes
    ///
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, vocab]`
    ///
    /// # Errors
    ///
    /// No token, a batch other than the cache's, or more tokens than the cache or the model has
    /// room for; the cache is then as it was.
    pub fn step(&self, ids: Tensor<2, Int>, cache: &mut ModelCache) -> Result<Tensor<3>> {
        Ok(self.head(self.hidden_step(ids, cache)?))
    }

    /// [`forward`](Self::forward) up to the final norm, for callers that apply [`head`](Self::head)
    /// to a few positions at a time.
    ///
    /// # Shapes
    ///
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    ///
    /// Those of [`forward`](Self::forward).
    pub fn hidden(
        &self,
        ids: Tensor<2, Int>,
        config: impl Into<ModelCacheConfig>,
    ) -> Result<Tensor<3>> {
        self.hidden_with(ids, &config.into(), FakeQuantOptions::default(), None)
    }

    /// [`hidden`](Self::hidden) with a choice of how training treats the quantizer; `observer` is
    /// called with every layer's attention.
    ///
    /// # Shapes
    ///
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    ///
    /// Those of [`forward`](Self::forward).
    pub fn hidden_with(
        &self,
        ids: Tensor<2, Int>,
        config: &ModelCacheConfig,
        options: FakeQuantOptions,
        observer: Option<&mut AttentionObserver<'_>>,
    ) -> Result<Tensor<3>> {
        config.validate(self)?;
        check_context(0, ids.dims()[1], "max_positions", self.max_positions())?;
        let observer = observer.map(|observe| observe as &mut AttentionObserver<'_>);
        self.run(ids, Pass::Parallel { config, options, observer })
    }

    /// [`step`](Self::step) up to the final norm.
    ///
    /// # Shapes
    ///
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    ///
    /// Those of [`step`](Self::step).
    pub fn hidden_step(&self, ids: Tensor<2, Int>, cache: &mut ModelCache) -> Result<Tensor<3>> {
        let [batch, seq] = ids.dims();
        cache.check(batch, seq)?;
        self.run(ids, Pass::Cached(cache))
    }

    /// [`hidden_step`](Self::hidden_step) for one token whose position, `[1]` i32, is on the
    /// device; see [`KvCache::attend_at`](kv_cubecl::KvCache::attend_at).
    pub(crate) fn hidden_at(
        &self,
        ids: Tensor<2, Int>,
        cache: &mut ModelCache,
        position: &Tensor<1, Int>,
    ) -> Result<Tensor<3>> {
        self.run(ids, Pass::At { cache, position })
    }

    fn run(&self, ids: Tensor<2, Int>, pass: Pass<'_>) -> Result<Tensor<3>> {
        match self {
            Self::Gpt2(model) => model.hidden(ids, pass),
            Self::Llama(model) => model.hidden(ids, pass),
        }
    }

    /// Logits of final-normed hidden states.
    ///
    /// # Shapes
    ///
    /// - hidden: `[batch, seq, hidden]`
    /// - output: `[batch, seq, vocab]`
    pub fn head(&self, hidden: Tensor<3>) -> Tensor<3> {
        match self {
            Self::Gpt2(model) => model.head(hidden),
            Self::Llama(model) => model.head(hidden),
        }
    }

    /// An empty cache for `batch` sequences.
    ///
    /// # Errors
    ///
    /// A `config` that does not fit the model, or a device that the cache does not support.
    pub fn new_cache(
        &self,
        config: impl Into<ModelCacheConfig>,
        batch: usize,
        device: &Device,
    ) -> Result<ModelCache> {
        let config = config.into();
        config.validate(self)?;
        let AttentionShape { n_kv_heads, head_dim, .. } = self.attention_shape();
        let shape = CacheShape { batch, n_kv_heads, head_dim };
        let rope = match self {
            Self::Gpt2(_) => None,
            Self::Llama(model) => Some(model.rope()),
        };
        ModelCache::new(&config, self.n_layers(), shape, self.max_positions(), rope, device)
    }

    /// Tokens the model knows.
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Gpt2(model) => model.config().vocab_size,
            Self::Llama(model) => model.config().vocab_size,
        }
    }

    /// The longest context the model was made for.
    pub fn max_positions(&self) -> usize {
        match self {
            Self::Gpt2(model) => model.config().max_positions,
            Self::Llama(model) => model.config().max_positions,
        }
    }

    /// Transformer layers.
    pub fn n_layers(&self) -> usize {
        match self {
            Self::Gpt2(model) => model.config().n_layers,
            Self::Llama(model) => model.config().n_layers,
        }
    }

    /// Query heads per layer.
    pub fn n_heads(&self) -> usize {
        self.attention_shape().n_heads
    }

    /// Key and value heads per layer.
    pub fn n_kv_heads(&self) -> usize {
        self.attention_shape().n_kv_heads
    }

    /// Channels per head.
    pub fn head_dim(&self) -> usize {
        self.attention_shape().head_dim
    }

    /// Width of the residual stream.
    pub fn hidden_size(&self) -> usize {
        match self {
            Self::Gpt2(model) => model.config().hidden_size,
            Self::Llama(model) => model.config().hidden_size,
        }
    }

    fn attention_shape(&self) -> AttentionShape {
        match self {
            Self::Gpt2(model) => model.config().attention_shape(),
            Self::Llama(model) => model.config().attention,
        }
    }
}
