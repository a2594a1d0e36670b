//! Loads the model that a user names, with its tokenizer.

use std::path::Path;

use anyhow::Result;
use burn::tensor::Device;
use kv_cubecl::{Flex, Target};
use kv_models::{
    LanguageModel, LoadOptions, Loaded, ModelCacheConfig, Tokenizer, WeightDtype,
    kv_weights::Activations, load_observed, load_with, spans::PHASE,
};
use tracing::trace_span;

use crate::{
    ModelArgs, Weights,
    hub::name_of,
    loading::{Loading, MemoryBudget, MemoryRequest},
    once,
    output::notes as print_notes,
};

/// A model with what its files say beside the weights.
#[derive(Debug)]
pub struct Source {
    /// The model.
    pub model: LanguageModel,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// The name of its file or folder.
    pub name: String,
    /// The cache that the model's files name, if any.
    pub cache: Option<ModelCacheConfig>,
    /// Notes for the user, already printed.
    pub notes: Vec<String>,
}

/// Loads a model and its tokenizer if `request` fits the memory budget, which is returned too.
/// `weights` is the representation of quantized weights without `--weights`.
///
/// # Errors
/// Fails for a model that is not found, cannot be loaded or does not fit.
pub fn load(
    args: &ModelArgs,
    weights: Weights,
    request: MemoryRequest,
    device: &Device,
) -> Result<(Source, MemoryBudget)> {
    load_within(args, weights, request, args.memory_budget(device), device)
}

/// Loads a model as [`load`] does, within `budget`.
///
/// # Errors
/// Fails as [`load`] does.
pub fn load_within(
    args: &ModelArgs,
    weights: Weights,
    request: MemoryRequest,
    budget: MemoryBudget,
    device: &Device,
) -> Result<(Source, MemoryBudget)> {
    let _phase = trace_span!(target: PHASE, "load").entered();
    let (path, options) = (args.source.find()?, args.options(weights, device));
    let loading = Loading::new(request, budget.clone(), device);
    let loaded = once(|| load_observed(&path, device, options, loading))?;
    budget.see(device);
    Ok((with_tokenizer(loaded, args.source.name())?, budget))
}

/// A model for a benchmark.
#[derive(Debug)]
pub struct Subject {
    /// The model.
    pub model: LanguageModel,
    /// Its tokenizer, or why it has none.
    pub tokenizer: kv_models::Result<Tokenizer>,
    /// The name of its file or folder, with the dtype of its weights unless that is f32.
    pub name: String,
}

/// Loads a model for a benchmark if `request` fits the memory budget, which is returned too.
///
/// # Errors
/// Fails for a model that is not found, cannot be loaded, or does not fit `request`.
pub fn load_model(
    args: &ModelArgs,
    request: MemoryRequest,
    device: &Device,
) -> Result<(Subject, MemoryBudget)> {
    let _phase = trace_span!(target: PHASE, "load").entered();
    let (options, budget) = (args.options(Weights::Packed, device), args.memory_budget(device));
    let loading = Loading::new(request, budget.clone(), device);
    let path = args.source.find()?;
    let Loaded { model, tokenizer, notes, .. } =
        once(|| load_observed(path, device, options, loading))?;
    print_notes(&notes);
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
    Ok((Subject { model, tokenizer, name }, budget))
}

/// Loads a model and its tokenizer without a check of memory.
///
/// # Errors
/// Fails for files that cannot be loaded.
pub fn read(path: &Path, device: &Device, options: LoadOptions) -> Result<Source> {
    with_tokenizer(load_with(path, device, options)?, name_of(path))
}

fn with_tokenizer(loaded: Loaded, name: String) -> Result<Source> {
    let Loaded { model, tokenizer, cache, notes, .. } = loaded;
    print_notes(&notes);
    Ok(Source { model, tokenizer: tokenizer?, name, cache, notes })
}
