//! gpt-oss: a mixture of experts with learned attention sinks, and sliding windows in some layers:
//! <https://arxiv.org/abs/2508.10925>.

mod config;
mod experts;
mod files;
mod model;

pub use config::Config;
pub use experts::{Expert, Experts, Stacks};
pub use model::{GptOss, Layer};

use crate::{
    ConfigJson, Family, LanguageModel, Result,
    checkpoint::Weights,
    gguf::{GgufNames, Metadata},
};

/// The files of gpt-oss.
#[derive(Debug)]
pub(crate) struct Files;

impl Family for Files {
    fn model_types(&self) -> &'static [&'static str] {
        &["gpt_oss"]
    }

    fn quantizations(&self) -> &'static [&'static str] {
        &["mxfp4"]
    }

    fn import(&self, config: &ConfigJson<'_>, weights: &mut Weights) -> Result<LanguageModel> {
        Ok(GptOss::import(Config::from_json(config)?, weights)?.into())
    }

    fn gguf(&self) -> &'static [(&'static str, GgufNames)] {
        &[("gpt-oss", files::GGUF)]
    }

    fn import_gguf(&self, metadata: &Metadata<'_>, weights: &mut Weights) -> Result<LanguageModel> {
        Ok(GptOss::import(Config::from_gguf(metadata, weights)?, weights)?.into())
    }
}
