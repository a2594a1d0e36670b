//! Prepare, train, convert.

use std::path::Path;

use burn::{
    module::Module,
    tensor::{Int, Tensor},
};
use kv_models::{
    AttentionObserver, LanguageModel, ModelCacheConfig, SaveOptions, Tokenizer, WeightDtype,
    kv_cubecl::{
        FakeQuantOptions, KvCacheConfig, Side,
        layout::{Schedule, SideSchedule},
    },
};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The cache that a model is prepared for, and how training treats it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QatConfig {
    /// The cache that the model is served with; training uses the same one.
    pub cache: ModelCacheConfig,
    /// The quantizer in training: its gradient, and whether it quantizes every token.
    #[serde(default)]
    pub fake_quant: FakeQuantOptions,
    /// Optimizer steps before the quantizer is switched on; until then the cache is float.
    #[serde(default)]
    pub start_step: u64,
}

impl QatConfig {
    /// Quantization by `cache` from the first step, with the identity as the quantizer's gradient.
    pub fn new(cache: impl Into<ModelCacheConfig>) -> Self {
        Self { cache: cache.into(), fake_quant: FakeQuantOptions::default(), start_step: 0 }
    }

    /// Refuses training that would never quantize: sequences too short to fill the residual, or a
    /// start after the last step.
    pub(crate) fn check(&self, seq_len: usize, steps: usize) -> Result<()> {
        if self.start_step >= steps as u64 {
            let rule =
                format!("must be below steps {steps}, or the quantizer is never switched on");
            return Err(Error::setting("start-step", self.start_step, rule));
        }
        // The model's layers and `head_dim` are not known yet, so all candidates are checked.
        self.cache.candidates().iter().try_for_each(|cache| self.check_cache(cache, seq_len))
    }

    /// Refuses sequences in which a cache would never quantize.
    fn check_cache(&self, cache: &KvCacheConfig, seq_len: usize) -> Result<()> {
        // The group size replaces the unknown `head_dim`, because it passes the rules on both.
        cache.validate(cache.group_size.max(1))?;
        // The last layer of a staggered model keeps the most tokens in float.
        let last = &cache.in_layer(cache.tile.tokens - 1, cache.tile.tokens);
        let schedule = Schedule::new(last);
        let missing = |len: usize| {
            let counts = schedule.counts(len);
            let quantized = |side: &Side| schedule.sides[*side] != SideSchedule::NEVER;
            Side::BOTH.into_iter().filter(quantized).find(|&side| counts[side] == 0)
        };
        if self.fake_quant.quantize_everything {
            return Ok(());
        }
        let Some(side) = missing(seq_len) else { return Ok(()) };
        // Two tokens past sinks and residual, both sides are quantized in every order of flushes.
        let longest = last.sink_tokens + last.residual_length + 2;
        let needed = (seq_len..longest).find(|&len| missing(len).is_none()).unwrap_or(longest);
        let rule = format!(
            "must be at least {needed} for {cache}, whose {side} stay in float until its residual \
             of {} tokens is full",
            last.residual_length
        );
        Err(Error::setting("seq-len", seq_len, rule))
    }

    /// The cache in optimizer step `step`, counted from 0.
    pub fn cache_at(&self, step: u64) -> ModelCacheConfig {
        if step < self.start_step { KvCacheConfig::float().into() } else { self.cache.clone() }
    }
}

/// A model whose parallel forward pass gives the same results as streaming through its cache.
#[derive(Module, Debug)]
pub struct Prepared {
    /// The model whose weights are trained.
    pub model: LanguageModel,
    #[module(skip)]
    config: QatConfig,
}

/// Refuses a model whose weights are not f32: small updates would be lost in the rounding.
pub(crate) fn check_f32(model: &LanguageModel) -> Result<()> {
    match model.weight_dtype() {
        WeightDtype::F32 => Ok(()),
        dtype => Err(Error::setting("dtype", dtype, "must be f32 to train; load the model as f32")),
    }
}

/// Makes `model` train with the cache of `config`.
///
/// # Errors
/// A cache that does not fit the model's heads, a float layer that does not exist, or weights in 16
/// bits: training updates f32 weights, to which [`kv_models::load()`] converts any file.
pub fn prepare(model: LanguageModel, config: QatConfig) -> Result<Prepared> {
    check_f32(&model)?;
    config.cache.validate(&model)?;
    Ok(Prepared { model, config })
}

impl Prepared {
    /// The configuration the model was prepared with.
    pub fn config(&self) -> &QatConfig {
        &self.config
    }

    /// Computes the logits of whole sequences with the quantizer on; differentiable.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, vocab]`
    ///
    /// # Errors
    /// As for [`LanguageModel::forward`].
    pub fn forward(&self, ids: Tensor<2, Int>) -> Result<Tensor<3>> {
        Ok(self.model.head(self.hidden(ids, self.config.start_step)?))
    }

    /// Runs [`forward`](Self::forward) up to the final norm, with the cache of optimizer step
    /// `step`.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    /// As for [`LanguageModel::forward`].
    pub fn hidden(&self, ids: Tensor<2, Int>, step: u64) -> Result<Tensor<3>> {
        self.hidden_with(ids, step, None)
    }

    /// Computes [`hidden`](Self::hidden), and calls `observer` with every layer's attention.
    pub(crate) fn hidden_with(
        &self,
        ids: Tensor<2, Int>,
        step: u64,
        observer: Option<&mut AttentionObserver<'_>>,
    ) -> Result<Tensor<3>> {
        let cache = self.config.cache_at(step);
        Ok(self.model.hidden_with(ids, &cache, self.config.fake_quant, observer)?)
    }

    /// Returns the plain model, with low-rank adapters merged into its weights, and the
    /// configuration of its cache. A Hadamard transform of values is folded into the weights if
    /// they allow it; see [`LanguageModel::fold_hadamard`].
    pub fn convert(self) -> Converted {
        let model = self.model.valid().materialize();
        let (model, cache) = model.fold_hadamard(self.config.cache);
        Converted { model, cache }
    }
}

/// A model ready to be served with a cache.
#[derive(Debug)]
pub struct Converted {
    /// The model.
    pub model: LanguageModel,
    /// The cache it was trained for.
    pub cache: ModelCacheConfig,
}

impl Converted {
    /// Writes a Hugging Face folder: safetensors in f16, `config.json`, the tokenizer, and
    /// `kv_cache.json`, which `kv-eval` and [`kv_models::load()`] read.
    ///
    /// # Errors
    /// A file that cannot be written. The error names it, and a model that was in the folder before
    /// is unchanged.
    pub fn save(&self, folder: impl AsRef<Path>, tokenizer: &Tokenizer) -> Result<()> {
        let options = SaveOptions { dtype: WeightDtype::F16, cache: Some(&self.cache) };
        Ok(kv_models::save(folder, &self.model, tokenizer, options)?)
    }
}
