//! The configuration of Qwen3-MoE, read from `config.json`.

use std::{collections::BTreeSet, path::Path};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    checkpoint::{Names, Weights},
    error::{Error, Result},
    family::ConfigJson,
    fields::{self, extended, required, sizes},
    gguf::{GgufNames, Metadata},
    llama,
    moe::{ExpertNames, ExpertsConfig, MoeConfig},
    spec::ModelSpec,
    stack::{DecoderConfig, LLAMA_GGUF, LLAMA_NAMES},
};

/// The configuration of a model, with all defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The fields that Qwen3 has, too. The width of the MLP is that of layers without experts.
    pub base: llama::Config,
    /// Layers, counted from 0, with an MLP instead of experts.
    pub dense_layers: BTreeSet<usize>,
    /// Experts per layer.
    pub n_experts: usize,
    /// Experts that compute each token.
    pub experts_per_token: usize,
    /// Width of an expert.
    pub expert_size: usize,
    /// True if the weights of the selected experts are divided by their sum.
    pub normalized: bool,
}

impl MoeConfig for Config {
    const NAME: &'static str = "Qwen3Moe";
    const NAMES: &'static Names = &Names { family: "Qwen3-MoE", ..LLAMA_NAMES };
    const EXPERTS: ExpertNames = ExpertNames::QWEN;
    const HAS_QK_NORMS: bool = true;

    fn base(&self) -> &llama::Config {
        &self.base
    }

    fn experts(&self, layer: usize) -> Option<ExpertsConfig> {
        let Self { n_experts, experts_per_token, expert_size, normalized, .. } = *self;
        let experts = ExpertsConfig::softmax(n_experts, experts_per_token, expert_size, normalized);
        (!self.dense_layers.contains(&layer)).then_some(experts)
    }
}

#[derive(Deserialize)]
struct Raw {
    num_experts: Option<usize>,
    num_local_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_intermediate_size: Option<usize>,
    norm_topk_prob: Option<bool>,
    decoder_sparse_step: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
}

impl DecoderConfig for Config {
    const MODEL_TYPES: &'static [&'static str] = &["qwen3_moe"];
    const GGUF: &'static [(&'static str, GgufNames)] = &[("qwen3moe", LLAMA_GGUF)];

    fn read(json: &ConfigJson<'_>, notes: &mut Vec<String>) -> Result<Self> {
        let (raw, path) = (json.parse::<Raw>()?, json.path);
        let base = llama::Config::read(json, notes)?;
        let step = raw.decoder_sparse_step.unwrap_or(1);
        if step == 0 {
            return Err(Error::config(path, "decoder_sparse_step", 0, "must be at least 1"));
        }
        let dense = raw.mlp_only_layers.unwrap_or_default();
        if let Some(layer) = dense.iter().find(|&&layer| layer >= base.n_layers) {
            let rule = format!("must be below num_hidden_layers {}", base.n_layers);
            return Err(Error::config(path, "mlp_only_layers", layer, rule));
        }
        let is_dense = |i: &usize| dense.contains(i) || !(i + 1).is_multiple_of(step);
        Ok(Self {
            dense_layers: (0..base.n_layers).filter(is_dense).collect(),
            n_experts: required(path, "num_experts", raw.num_experts.or(raw.num_local_experts))?,
            experts_per_token: required(path, "num_experts_per_tok", raw.num_experts_per_tok)?,
            expert_size: required(path, "moe_intermediate_size", raw.moe_intermediate_size)?,
            // The default of the transformers library.
            normalized: raw.norm_topk_prob.unwrap_or(false),
            base,
        })
    }

    fn read_gguf(metadata: &Metadata<'_>, weights: &mut Weights) -> Result<Self> {
        let base = llama::Config::read_gguf(metadata, weights)?;
        let is_dense = |i: &usize| {
            let names = ["gate", "experts.gate_proj"].map(|part| format!("layers.{i}.mlp.{part}"));
            !names.iter().any(|name| weights.contains(&format!("{name}.weight")))
        };
        Ok(Self {
            dense_layers: (0..base.n_layers).filter(is_dense).collect(),
            n_experts: metadata.size("expert_count")?,
            experts_per_token: metadata.size("expert_used_count")?,
            expert_size: metadata.size("expert_feed_forward_length")?,
            // GGUF files do not contain this. It is true in the published models, and llama.cpp
            // always divides.
            normalized: true,
            base,
        })
    }

    fn check(&self, path: &Path) -> Result<()> {
        self.base.check(path)?;
        fields::experts(path, ("num_experts", self.n_experts), self.experts_per_token)?;
        sizes(path, &[("moe_intermediate_size", self.expert_size)])
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
        let fields = self.base.to_json(path)?;
        Ok(extended(
            fields,
            json!({
                "architectures": ["Qwen3MoeForCausalLM"],
                "model_type": "qwen3_moe",
                "num_experts": self.n_experts,
                "num_experts_per_tok": self.experts_per_token,
                "moe_intermediate_size": self.expert_size,
                "norm_topk_prob": self.normalized,
                "decoder_sparse_step": 1,
                "mlp_only_layers": self.dense_layers,
            }),
        ))
    }
}
