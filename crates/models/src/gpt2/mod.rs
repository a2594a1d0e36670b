//! GPT-2.

mod config;
mod export;
mod gguf;
mod import;
mod model;
mod names;

pub use config::{Activation, Config};
pub use model::{Gpt2, Layer};

use crate::{
    ConfigJson, Family, LanguageModel, Result,
    checkpoint::Weights,
    gguf::{GgufNames, Metadata},
};

/// GPT-2's files.
#[derive(Debug)]
pub(crate) struct Files;

impl Family for Files {
    fn model_types(&self) -> &'static [&'static str] {
        &["gpt2"]
    }

    fn import(&self, config: &ConfigJson<'_>, weights: &mut Weights) -> Result<LanguageModel> {
        let config = Config::from_json(config.text, config.path)?;
        Ok(Gpt2::import(config, weights)?.into())
    }

    fn gguf(&self) -> &'static [(&'static str, GgufNames)] {
        &[("gpt2", names::GGUF)]
    }

    fn import_gguf(&self, metadata: &Metadata<'_>, weights: &mut Weights) -> Result<LanguageModel> {
        let config = Config::from_gguf(metadata, weights)?;
        Ok(Gpt2::import(config, weights)?.into())
    }
}
