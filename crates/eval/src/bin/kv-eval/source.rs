//! From what a user names to a model with its tokenizer.

use std::path::Path;

use anyhow::Result;
use burn::tensor::Device;
use kv_cli::name_of;
use kv_models::{LanguageModel, Loaded, ModelCacheConfig, Tokenizer};

use crate::common::ModelArgs;

/// A model with a tokenizer.
pub(crate) struct Source {
    pub(crate) model: LanguageModel,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) name: String,
    /// The cache it was trained with, if it says so.
    pub(crate) cache: Option<ModelCacheConfig>,
}

/// Loads the model and tokenizer that are named.
pub(crate) fn load(args: &ModelArgs, device: &Device) -> Result<Source> {
    let source = read(&args.source.find()?, device)?;
    Ok(Source { name: args.source.name(), ..source })
}

/// The model that is named, and its name.
pub(crate) fn load_model(args: &ModelArgs, device: &Device) -> Result<(LanguageModel, String)> {
    let Loaded { model, notes, .. } = kv_models::load(args.source.find()?, device)?;
    kv_cli::notes(&notes);
    Ok((model, args.source.name()))
}

/// Loads a folder or file.
pub(crate) fn read(path: &Path, device: &Device) -> Result<Source> {
    let Loaded { model, tokenizer, cache, notes, .. } = kv_models::load(path, device)?;
    kv_cli::notes(&notes);
    Ok(Source { model, tokenizer: tokenizer?, name: name_of(path), cache })
}
