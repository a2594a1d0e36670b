//! From what a user names to a model with its tokenizer.

use std::path::Path;

use anyhow::Result;
use burn::tensor::Device;
use kv_cli::hub::resolve;
use kv_models::{LanguageModel, Loaded, ModelCacheConfig, Tokenizer};

/// A model with a tokenizer.
pub(crate) struct Source {
    pub(crate) model: LanguageModel,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) name: String,
    /// The cache it was trained with, if it says so.
    pub(crate) cache: Option<ModelCacheConfig>,
}

/// Loads what `model` names.
pub(crate) fn load(model: &str, device: &Device) -> Result<Source> {
    read(&resolve(model)?, device)
}

/// Loads a folder or file.
pub(crate) fn read(path: &Path, device: &Device) -> Result<Source> {
    let Loaded { model, tokenizer, name, cache, notes, .. } = kv_models::load(path, device)?;
    kv_cli::note(&notes);
    Ok(Source { model, tokenizer: tokenizer?, name, cache })
}
