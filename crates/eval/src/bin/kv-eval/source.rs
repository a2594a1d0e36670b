//! From what a user names to a model with its tokenizer.

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
    loading::{Loading, Need, Room},
};

/// A model with a tokenizer.
pub(crate) struct Source {
    pub(crate) model: LanguageModel,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) name: String,
    /// The cache it was trained with, if it says so.
    pub(crate) cache: Option<ModelCacheConfig>,
    /// What a user should know of it, which has been printed.
    pub(crate) notes: Vec<String>,
}

/// A model with a tokenizer that is known to fit.
pub(crate) struct Fitting {
    pub(crate) source: Source,
    /// The memory it was found to fit into.
    pub(crate) room: Room,
}

/// Loads the model and tokenizer that are named, if there is memory for what is done with them; `weights` is what
/// becomes of quantized ones by default.
pub(crate) fn load(
    args: &ModelArgs,
    weights: Weights,
    need: Need,
    device: &Device,
) -> Result<Fitting> {
    let _phase = trace_span!(target: PHASE, "load").entered();
    let (path, options, room) =
        (args.source.find()?, args.options(weights, device), args.room(device));
    let loading = Loading::new(need, room.clone(), device);
    let loaded = once(|| load_observed(&path, device, options, loading))?;
    Ok(Fitting { source: with_tokenizer(loaded, args.source.name())?, room })
}

/// The model that is named, and its name, with the type of its weights unless that is f32.
/// Fails if there is no memory for what is done with it.
pub(crate) fn load_model(
    args: &ModelArgs,
    need: Need,
    device: &Device,
) -> Result<(LanguageModel, String)> {
    let _phase = trace_span!(target: PHASE, "load").entered();
    let options = args.options(Weights::Packed, device);
    let loading = Loading::new(need, args.room(device), device);
    let path = args.source.find()?;
    let Loaded { model, notes, .. } = once(|| load_observed(path, device, options, loading))?;
    kv_cli::notes(&notes);
    let name = args.source.name();
    let name = match (model.weight_dtype(), options.packed.filter(|_| model.is_packed())) {
        // Where activations are not rounded, how is not named.
        (_, Some(_)) if !Flex::hosts(device) => format!("{name}, packed"),
        (_, Some(Activations::Exact)) => format!("{name}, packed, exact"),
        (_, Some(Activations::Int8)) => format!("{name}, packed, int8"),
        (_, Some(_)) => format!("{name}, packed"),
        (WeightDtype::F32, None) => name,
        (dtype, None) => format!("{name} in {dtype}"),
    };
    Ok((model, name))
}

/// Loads a folder or file.
pub(crate) fn read(path: &Path, device: &Device, options: LoadOptions) -> Result<Source> {
    with_tokenizer(load_with(path, device, options)?, name_of(path))
}

fn with_tokenizer(loaded: Loaded, name: String) -> Result<Source> {
    let Loaded { model, tokenizer, cache, notes, .. } = loaded;
    kv_cli::notes(&notes);
    Ok(Source { model, tokenizer: tokenizer?, name, cache, notes })
}
