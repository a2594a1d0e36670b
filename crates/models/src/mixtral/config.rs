//! The configuration of Mixtral, read from `config.json` or a GGUF file.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    checkpoint::{Names, Weights},
    error::{Error, Result},
    family::ConfigJson,
    fields::{self, extended, required},
    gguf::{GgufNames, Metadata},
    llama,
    moe::{ExpertNames, ExpertsConfig, MoeConfig},
    spec::ModelSpec,
    stack::{DecoderConfig, LLAMA_GGUF, LLAMA_NAMES},
};

/// The configuration of a model, with all defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The fields that Mistral has, too. The width of the MLP is the width of an expert.
    pub base: llama::Config,
    /// Experts per layer.
    pub n_experts: usize,
    /// Experts that compute each token.
    pub experts_per_token: usize,
}

#[derive(Deserialize)]
struct Raw {
    num_local_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
}

impl MoeConfig for Config {
    const NAME: &'static str = "Mixtral";
    const NAMES: &'static Names = &Names { family: "Mixtral", ..LLAMA_NAMES };
    const EXPERTS: ExpertNames = ExpertNames {
        router: "block_sparse_moe.gate",
        experts: "block_sparse_moe.experts",
        parts: ["w1", "w3", "w2"],
        ..ExpertNames::QWEN
    };
    const HAS_QK_NORMS: bool = false;

    fn base(&self) -> &llama::Config {
        &self.base
    }

    fn experts(&self, _: usize) -> Option<ExpertsConfig> {
        let width = self.base.intermediate_size;
        Some(ExpertsConfig::softmax(self.n_experts, self.experts_per_token, width, true))
    }
}

impl DecoderConfig for Config {
    const MODEL_TYPES: &'static [&'static str] = &["mixtral"];
    const GGUF: &'static [(&'static str, GgufNames)] = &[("llama with experts", LLAMA_GGUF)];

    fn read(json: &ConfigJson<'_>, notes: &mut Vec<String>) -> Result<Self> {
        let (raw, path) = (json.parse::<Raw>()?, json.path);
        Ok(Self {
            base: llama::Config::read(json, notes)?,
            n_experts: required(path, "num_local_experts", raw.num_local_experts)?,
            experts_per_token: required(path, "num_experts_per_tok", raw.num_experts_per_tok)?,
        })
    }

    fn read_gguf(metadata: &Metadata<'_>, weights: &mut Weights) -> Result<Self> {
        if weights.contains("layers.0.ffn_gate.0.weight") {
            let why = format!(
                "{} has blk.0.ffn_gate.0.weight; convert the model with a newer llama.cpp, which \
                 writes blk.0.ffn_gate_exps.weight for all experts",
                metadata.path().display()
            );
            return Err(Error::unsupported("tensors of single experts", why));
        }
        Ok(Self {
            base: llama::Config::read_gguf(metadata, weights)?,
            n_experts: metadata.size("expert_count")?,
            experts_per_token: metadata.size("expert_used_count")?,
        })
    }

    fn check(&self, path: &Path) -> Result<()> {
        self.base.check(path)?;
        fields::experts(path, ("num_local_experts", self.n_experts), self.experts_per_token)
    }

    fn spec(&self) -> ModelSpec {
        self.base.spec()
    }

    fn tied_head(&self) -> bool {
        self.base.tied_head
    }

    fn norm_epsilon(&self) -> f64 {
        self.base.norm_epsilon
    }

    /// Returns the fields that [`read`](Self::read) reads.
    fn to_json(&self, path: &Path) -> Result<Map<String, Value>> {
        let fields = self.base.to_mistral_json(path)?;
        Ok(extended(
            fields,
            json!({
                "architectures": ["MixtralForCausalLM"],
                "model_type": "mixtral",
                "num_local_experts": self.n_experts,
                "num_experts_per_tok": self.experts_per_token,
            }),
        ))
    }
}
