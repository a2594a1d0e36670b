//! From what a user names to a model with its tokenizer.

use std::path::Path;

use anyhow::Result;
use burn::tensor::Device;
use kv_cli::name_of;
use kv_models::{
    LanguageModel, LoadOptions, Loaded, ModelCacheConfig, Tokenizer, WeightDtype,
    kv_weights::Activations, load_with, spans::PHASE,
};
use tracing::trace_span;

use crate::common::{ModelArgs, Weights};

/// A model with a tokenizer.
pub(crate) struct Source {
    pub(crate) model: LanguageModel,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) name: String,
    /// The cache it was trained with, if it says so.
    pub(crate) cache: Option<ModelCacheConfig>,
}

/// Loads the model and tokenizer that are named; `weights` is what becomes of quantized ones by default.
pub(crate) fn load(args: &ModelArgs, weights: Weights, device: &Device) -> Result<Source> {
    let _phase = trace_span!(target: PHASE, "load").entered();
    let source = read(&args.source.find()?, device, args.options(weights, device))?;
    Ok(Source { name: args.source.name(), ..source })
}

/// The model that is named, and its name, with the type of its weights unless that is f32.
pub(crate) fn load_model(args: &ModelArgs, device: &Device) -> Result<(LanguageModel, String)> {
    let _phase = trace_span!(target: PHASE, "load").entered();
    let options = args.options(Weights::Packed, device);
    let Loaded { model, notes, .. } = load_with(args.source.find()?, device, options)?;
    kv_cli::notes(&notes);
    let name = args.source.name();
    let name = match (model.weight_dtype(), options.packed.filter(|_| model.is_packed())) {
        (_, Some(Activations::Exact)) => format!("{name}, packed, exact"),
        (_, Some(Activations::Bytes)) => format!("{name}, packed, bytes"),
        (_, Some(_)) => format!("{name}, packed"),
        (WeightDtype::F32, None) => name,
        (dtype, None) => format!("{name} in {dtype}"),
    };
    Ok((model, name))
}

/// Loads a folder or file.
pub(crate) fn read(path: &Path, device: &Device, options: LoadOptions) -> Result<Source> {
    let Loaded { model, tokenizer, cache, notes, .. } = load_with(path, device, options)?;
    kv_cli::notes(&notes);
    Ok(Source { model, tokenizer: tokenizer?, name: name_of(path), cache })
}
