//! The configuration of gpt-oss, read from `config.json` or a GGUF file.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::names::GGUF;
use crate::{
    checkpoint::Weights,
    error::{Error, Result},
    family::ConfigJson,
    fields::{experts, positive, required},
    gguf::{GgufNames, Metadata},
    nn::RopeScaling,
    rope_config::RopeFields,
    spec::ModelSpec,
    stack::{self, DecoderConfig, SlidingConfig},
};

/// The configuration of a model, with all defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The fields that Gemma 3 has, too.
    pub shared: SlidingConfig,
    /// Experts per layer.
    pub n_experts: usize,
    /// Experts that compute each token.
    pub experts_per_token: usize,
    /// Bound of the values inside an expert.
    pub swiglu_limit: f64,
}

/// The published models. Every second layer sees all tokens.
const DEFAULTS: stack::Defaults = stack::Defaults {
    pattern: 2,
    reads_pattern: false,
    norm_epsilon: 1e-5,
    attention_bias: true,
    tied_head: false,
    rope_theta: 150_000.0,
};
const LIMIT: f64 = 7.0;
/// The factor in the gate's sigmoid: `x * sigmoid(1.702 x)` approximates GELU.
pub(super) const ALPHA: f64 = 1.702;

#[derive(Deserialize)]
struct Raw {
    num_local_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    /// The name in other files; the published ones have both.
    experts_per_token: Option<usize>,
    swiglu_limit: Option<f64>,
    swiglu_alpha: Option<f64>,
    hidden_act: Option<String>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeFields>,
    rope_parameters: Option<RopeFields>,
}

impl DecoderConfig for Config {
    const MODEL_TYPES: &'static [&'static str] = &["gpt_oss"];
    const QUANTIZATIONS: &'static [&'static str] = &["mxfp4"];
    const GGUF: &'static [(&'static str, GgufNames)] = &[("gpt-oss", GGUF)];

    fn read(json: &ConfigJson<'_>, _: &mut Vec<String>) -> Result<Self> {
        let (raw, path) = (json.parse::<Raw>()?, json.path);
        let act = raw.hidden_act.as_deref().unwrap_or("silu");
        if act != "silu" {
            let why = format!("{} has hidden_act {act}; only silu is supported", path.display());
            return Err(Error::unsupported("activation", why));
        }
        if let Some(alpha) = raw.swiglu_alpha.filter(|alpha| *alpha != ALPHA) {
            return Err(Error::config(path, "swiglu_alpha", alpha, format!("must be {ALPHA}")));
        }
        let mut shared = SlidingConfig::from_json(json, &DEFAULTS)?;
        // Without a rope type the transformers library assumes YaRN, so the file is ambiguous.
        let rope = raw.rope_parameters.as_ref().or(raw.rope_scaling.as_ref());
        if raw.rope_theta.is_none() && rope.and_then(RopeFields::kind).is_none() {
            let rule = "must have a rope_type, as yarn or default";
            return Err(Error::config(path, "rope_parameters", "missing", rule));
        }
        let theta = rope.and_then(|rope| rope.rope_theta).or(raw.rope_theta);
        shared.rope_theta = theta.unwrap_or(DEFAULTS.rope_theta);
        if let Some(rope) = rope {
            shared.rope_scaling = rope.scaling(path, shared.max_positions, None)?;
        }
        Ok(Self {
            shared,
            n_experts: required(path, "num_local_experts", raw.num_local_experts)?,
            experts_per_token: required(
                path,
                "num_experts_per_tok",
                raw.num_experts_per_tok.or(raw.experts_per_token),
            )?,
            swiglu_limit: raw.swiglu_limit.unwrap_or(LIMIT),
        })
    }

    fn read_gguf(metadata: &Metadata<'_>, weights: &mut Weights) -> Result<Self> {
        let width = metadata.size("expert_feed_forward_length")?;
        let n_kv_heads = metadata.optional_size("attention.head_count_kv")?;
        let mut shared = SlidingConfig::from_gguf(metadata, weights, width, n_kv_heads, &DEFAULTS)?;
        if let RopeScaling::Yarn { truncate, .. } = &mut shared.rope_scaling {
            // The published models were trained without truncation, which GGUF files do not
            // contain.
            *truncate = false;
        }
        Ok(Self {
            shared,
            n_experts: metadata.size("expert_count")?,
            experts_per_token: metadata.size("expert_used_count")?,
            swiglu_limit: LIMIT,
        })
    }

    fn check(&self, path: &Path) -> Result<()> {
        self.shared.check(path)?;
        experts(path, ("num_local_experts", self.n_experts), self.experts_per_token)?;
        positive(path, "swiglu_limit", self.swiglu_limit)
    }

    fn spec(&self) -> ModelSpec {
        self.shared.spec(self.shared.layer(), None)
    }

    fn tied_head(&self) -> bool {
        self.shared.tied_head
    }

    fn norm_epsilon(&self) -> f64 {
        self.shared.norm_epsilon
    }

    /// Returns the fields that [`read`](Self::read) reads.
    fn to_json(&self, _: &Path) -> Result<Map<String, Value>> {
        Ok(self.shared.to_json(json!({
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "num_local_experts": self.n_experts,
            "num_experts_per_tok": self.experts_per_token,
            "swiglu_limit": self.swiglu_limit,
            "hidden_act": "silu",
        })))
    }
}
