//! Gemma 3, the text model: <https://arxiv.org/abs/2503.19786>.

mod config;
mod files;
mod model;

pub use config::Config;
pub use model::{Gemma3, Layer};

use crate::{
    ConfigJson, Family, LanguageModel, Result,
    checkpoint::Weights,
    gguf::{GgufNames, Metadata},
};

/// The files of Gemma 3.
#[derive(Debug)]
pub(crate) struct Files;

impl Family for Files {
    fn model_types(&self) -> &'static [&'static str] {
        &["gemma3_text"]
    }

    fn import(&self, config: &ConfigJson<'_>, weights: &mut Weights) -> Result<LanguageModel> {
        Ok(Gemma3::import(Config::from_json(config)?, weights)?.into())
    }

    fn gguf(&self) -> &'static [(&'static str, GgufNames)] {
        &[("gemma3", files::GGUF)]
    }

    fn import_gguf(&self, metadata: &Metadata<'_>, weights: &mut Weights) -> Result<LanguageModel> {
        Ok(Gemma3::import(Config::from_gguf(metadata, weights)?, weights)?.into())
    }
}
