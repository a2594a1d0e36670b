//! From what a user names to a model with its tokenizer.

use std::path::Path;

use anyhow::Result;
use burn::tensor::Device;
use kv_cli::hub::resolve;
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
    let source = read(&resolve(&args.model, args.revision.as_deref())?, device)?;
    Ok(Source { name: name(args), ..source })
}

/// The model that is named, and its name.
pub(crate) fn load_model(args: &ModelArgs, device: &Device) -> Result<(LanguageModel, String)> {
    let path = resolve(&args.model, args.revision.as_deref())?;
    let Loaded { model, notes, .. } = kv_models::load(path, device)?;
    kv_cli::notes(&notes);
    Ok((model, name(args)))
}

/// Loads a folder or file.
pub(crate) fn read(path: &Path, device: &Device) -> Result<Source> {
    let Loaded { model, tokenizer, cache, notes, .. } = kv_models::load(path, device)?;
    kv_cli::notes(&notes);
    Ok(Source { model, tokenizer: tokenizer?, name: name_of(path), cache })
}

/// A model of the hub is called what it is called there.
fn name(args: &ModelArgs) -> String {
    match Path::new(&args.model) {
        path if path.exists() => name_of(path),
        _ => args.model.clone(),
    }
}

/// The name of a model's file or folder.
fn name_of(path: &Path) -> String {
    // A path such as `.` has no name of its own.
    let whole = path.canonicalize().unwrap_or_else(|_| path.into());
    let name = if whole.is_dir() { whole.file_name() } else { whole.file_stem() };
    name.map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}
