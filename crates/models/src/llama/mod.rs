//! The Llama family: Llama 2 and 3, Mistral, SmolLM, SmolLM2 and SmolLM3, Qwen2 and Qwen3, Phi-3
//! and Phi-4-mini. [`Config`] covers their differences.

mod config;
mod export;
mod gguf;
mod import;
mod init;
mod model;
mod names;
mod resolve;

pub use config::Config;
pub use model::{Layer, Llama};

use crate::{
    ConfigJson, Family, LanguageModel, Result,
    checkpoint::Weights,
    gguf::{GgufNames, Metadata},
};

/// The files of the Llama family.
#[derive(Debug)]
pub(crate) struct Files;

impl Family for Files {
    fn model_types(&self) -> &'static [&'static str] {
        &["llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3"]
    }

    fn import(&self, config: &ConfigJson<'_>, weights: &mut Weights) -> Result<LanguageModel> {
        let config = Config::resolve(config.text, config.path, weights.notes())?;
        Ok(Llama::import(config, weights)?.into())
    }

    fn gguf(&self) -> &'static [(&'static str, GgufNames)] {
        &[
            ("llama", names::GGUF),
            ("phi3", names::GGUF_PHI3),
            ("qwen2", names::GGUF),
            ("qwen3", names::GGUF),
            ("smollm3", names::GGUF),
        ]
    }

    fn import_gguf(&self, metadata: &Metadata<'_>, weights: &mut Weights) -> Result<LanguageModel> {
        let config = Config::from_gguf(metadata, weights)?;
        if matches!(metadata.arch(), "llama" | "smollm3") {
            config.interleaved(weights);
        }
        Ok(Llama::import(config, weights)?.into())
    }
}
