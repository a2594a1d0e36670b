//! Prepare, train, convert.

use std::path::Path;

use burn::{
    module::Module,
    tensor::{Int, Tensor},
};
use kv_models::{
    LanguageModel, ModelCacheConfig, SaveDtype, SaveOptions, Tokenizer,
    kv_cubecl::{FakeQuantOptions, KvCacheConfig},
};
use serde::{Deserialize, Serialize};

use crate::Result;

/// What a model is prepared for: the cache it will be served with, and how training sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QatConfig {
    /// The cache in serving; training uses the same.
    pub cache: ModelCacheConfig,
    /// The gradient of the quantizer, and the mode that quantizes everything.
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

    /// What the cache stores in optimizer step `step`, counted from 0.
    pub fn cache_at(&self, step: u64) -> ModelCacheConfig {
        if step < self.start_step { KvCacheConfig::float().into() } else { self.cache.clone() }
    }
}

/// A model whose parallel forward pass computes what streaming through its cache would.
#[derive(Module, Debug)]
pub struct Prepared {
    /// The model; its weights are those that are trained.
    pub model: LanguageModel,
    #[module(skip)]
    config: QatConfig,
}

/// Makes `model` train with the cache of `config`.
///
/// # Errors
/// A cache that does not fit the model's heads, or a float layer that it does not have.
pub fn prepare(model: LanguageModel, config: QatConfig) -> Result<Prepared> {
    config.cache.validate(&model)?;
    Ok(Prepared { model, config })
}

impl Prepared {
    /// What it was prepared for.
    pub fn config(&self) -> &QatConfig {
        &self.config
    }

    /// Logits of whole sequences with the quantizer on; differentiable.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, vocab]`
    ///
    /// # Errors
    /// Those of [`LanguageModel::forward`].
    pub fn forward(&self, ids: Tensor<2, Int>) -> Result<Tensor<3>> {
        Ok(self.model.head(self.hidden(ids, self.config.start_step)?))
    }

    /// [`forward`](Self::forward) up to the final norm, as optimizer step `step` computes it.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    /// Those of [`LanguageModel::forward`].
    pub fn hidden(&self, ids: Tensor<2, Int>, step: u64) -> Result<Tensor<3>> {
        let cache = self.config.cache_at(step);
        Ok(self.model.hidden_with(ids, &cache, self.config.fake_quant, None)?)
    }

    /// The plain model with its weights unchanged, low-rank adapters merged into them, and the
    /// configuration of its cache beside it.
    pub fn convert(self) -> Converted {
        Converted { model: self.model.valid().materialize(), cache: self.config.cache }
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
    /// `kv_cache.json`, which `kv-eval` and [`kv_models::load()`] pick up.
    ///
    /// # Errors
    /// A file that cannot be written, named; an earlier folder is then as it was.
    pub fn save(&self, folder: impl AsRef<Path>, tokenizer: &Tokenizer) -> Result<()> {
        let options = SaveOptions { dtype: SaveDtype::F16, cache: Some(&self.cache) };
        Ok(kv_models::save(folder, &self.model, tokenizer, options)?)
    }
}
