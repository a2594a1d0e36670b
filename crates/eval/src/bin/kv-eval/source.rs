//! From what a user names to a model with its tokenizer.

use std::path::Path;

use anyhow::Result;
use burn::tensor::Device;
use kv_cli::name_of;
use kv_models::{
    LanguageModel, LoadOptions, Loaded, ModelCacheConfig, Tokenizer, WeightDtype, load_with,
    spans::PHASE,
};
use tracing::trace_span;

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
    let _phase = trace_span!(target: PHASE, "load").entered();
    let source = read(&args.source.find()?, device, args.dtype)?;
    Ok(Source { name: args.source.name(), ..source })
}

/// The model that is named, and its name, with the type of its weights unless that is f32.
pub(crate) fn load_model(args: &ModelArgs, device: &Device) -> Result<(LanguageModel, String)> {
    let _phase = trace_span!(target: PHASE, "load").entered();
    let options = LoadOptions::default().with_dtype(args.dtype);
    let Loaded { model, notes, .. } = load_with(args.source.find()?, device, options)?;
    kv_cli::notes(&notes);
    let name = match model.weight_dtype() {
        WeightDtype::F32 => args.source.name(),
        dtype => format!("{} in {dtype}", args.source.name()),
    };
    Ok((model, name))
}

/// Loads a folder or file.
pub(crate) fn read(path: &Path, device: &Device, dtype: WeightDtype) -> Result<Source> {
    let options = LoadOptions::default().with_dtype(dtype);
    let Loaded { model, tokenizer, cache, notes, .. } = load_with(path, device, options)?;
    kv_cli::notes(&notes);
    Ok(Source { model, tokenizer: tokenizer?, name: name_of(path), cache })
}
