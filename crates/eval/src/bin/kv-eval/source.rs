//! Loads the model that a user names, with its tokenizer.

use std::path::Path;

use anyhow::Result;
use burn::tensor::Device;
use kv_cli::{name_of, once};
use kv_cubecl::{Flex, Target};
use kv_models::{
    LanguageModel, LoadOptions, Loaded, ModelCacheConfig, Tokenizer, WeightDtype,
    kv_weights::Activations, load_observed, load_with, spans::PHASE,
};
use tracing::trace_span;

use crate::{
    common::{ModelArgs, Weights},
    loading::{Loading, MemoryBudget, MemoryRequest},
};

pub(crate) struct Source {
    pub(crate) model: LanguageModel,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) name: String,
    /// The cache that the model's files name, if any.
    pub(crate) cache: Option<ModelCacheConfig>,
    /// Notes for the user, already printed.
    pub(crate) notes: Vec<String>,
}

/// Loads a model and its tokenizer if `request` fits the memory budget, which is returned too.
/// `weights` is the representation of quantized weights without `--weights`.
pub(crate) fn load(
    args: &ModelArgs,
    weights: Weights,
    request: MemoryRequest,
    device: &Device,
) -> Result<(Source, MemoryBudget)> {
    let _phase = trace_span!(target: PHASE, "load").entered();
    let (path, options, budget) =
        (args.source.find()?, args.options(weights, device), args.memory_budget(device));
    let loading = Loading::new(request, budget.clone(), device);
    let loaded = once(|| load_observed(&path, device, options, loading))?;
    budget.see(device);
    Ok((with_tokenizer(loaded, args.source.name())?, budget))
}

/// Loads a model and returns it with its name, with the dtype of its weights unless that is f32,
/// and the memory budget. Fails if `request` exceeds it.
pub(crate) fn load_model(
    args: &ModelArgs,
    request: MemoryRequest,
    device: &Device,
) -> Result<(LanguageModel, String, MemoryBudget)> {
    let _phase = trace_span!(target: PHASE, "load").entered();
    let (options, budget) = (args.options(Weights::Packed, device), args.memory_budget(device));
    let loading = Loading::new(request, budget.clone(), device);
    let path = args.source.find()?;
    let Loaded { model, notes, .. } = once(|| load_observed(path, device, options, loading))?;
    kv_cli::notes(&notes);
    let head = args.head.map_or(String::new(), |format| format!(", head {format}"));
    let name = format!("{}{head}", args.source.name());
    let name = match (model.weight_dtype(), options.packed.filter(|_| model.is_packed())) {
        // A GPU never rounds activations, so the name leaves the rounding out.
        (_, Some(_)) if !Flex::hosts(device) => format!("{name}, packed"),
        (_, Some(Activations::Exact)) => format!("{name}, packed, exact"),
        (_, Some(Activations::Int8)) => format!("{name}, packed, int8"),
        (_, Some(_)) => format!("{name}, packed"),
        (WeightDtype::F32, None) => name,
        (dtype, None) => format!("{name} in {dtype}"),
    };
    Ok((model, name, budget))
}

pub(crate) fn read(path: &Path, device: &Device, options: LoadOptions) -> Result<Source> {
    with_tokenizer(load_with(path, device, options)?, name_of(path))
}

fn with_tokenizer(loaded: Loaded, name: String) -> Result<Source> {
    let Loaded { model, tokenizer, cache, notes, .. } = loaded;
    kv_cli::notes(&notes);
    Ok(Source { model, tokenizer: tokenizer?, name, cache, notes })
}
