//! From what a user names to files on this machine.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use hf_hub::HFClientSync;

/// Files of a model repository that a model is read from.
const WANTED: [&str; 4] = ["*.json", "*.safetensors", "tokenizer*", "pytorch_model*.bin"];

/// A local path as it is, else a Hugging Face model id, downloaded once into the hub's cache.
///
/// # Errors
/// What is neither, and what the hub does not give.
pub fn resolve(model: &str) -> Result<PathBuf> {
    let path = Path::new(model);
    if path.exists() {
        return Ok(path.into());
    }
    let id = model.split_once('/').filter(|(owner, name)| {
        let part = |s: &str| {
            !s.is_empty()
                && !s.starts_with('.')
                && s.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        };
        part(owner) && part(name) && !name.ends_with(".gguf")
    });
    let Some((owner, name)) = id else {
        bail!("model {model}: no such file or folder, and not a model id of the form owner/name");
    };
    HFClientSync::new()
        .and_then(|client| {
            let wanted = WANTED.map(String::from).to_vec();
            client.model(owner, name).snapshot_download().allow_patterns(wanted).send()
        })
        .with_context(|| format!("model {model}: no such path here, and the hub did not give it"))
}
