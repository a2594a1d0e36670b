//! The configuration of Gemma 3, read from `config.json` or a GGUF file.

use std::path::Path;

use kv_cubecl::AttentionOptions;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::names;
use crate::{
    checkpoint::Weights,
    error::{Error, Result},
    family::ConfigJson,
    fields::positive,
    gguf::{GgufNames, Metadata},
    nn::{Rope, RopeScaling},
    rope_config::RopeFields,
    spec::ModelSpec,
    stack::{DecoderConfig, Defaults, RopeByKind, SlidingConfig},
};

/// The configuration of a model, with all defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The fields that gpt-oss has, too.
    pub shared: SlidingConfig,
    /// Attention scores are multiplied by its inverse square root.
    pub query_scalar: f64,
    /// Bound of the attention scores, if any.
    pub softcap: Option<f32>,
    /// Base of the rope frequencies of layers with a sliding window.
    pub local_rope_theta: f64,
}

/// The published models. Every sixth layer sees all tokens.
const DEFAULTS: Defaults = Defaults {
    pattern: 6,
    reads_pattern: true,
    norm_epsilon: 1e-6,
    attention_bias: false,
    tied_head: true,
    rope_theta: 1e6,
};
const LOCAL_THETA: f64 = 1e4;

#[derive(Deserialize)]
struct Raw {
    attn_logit_softcapping: Option<f32>,
    final_logit_softcapping: Option<f32>,
    use_bidirectional_attention: Option<bool>,
    query_pre_attn_scalar: Option<f64>,
    rope_theta: Option<f64>,
    rope_parameters: Option<RopeByKind>,
    /// Older files have `rope_theta` and `rope_scaling` for layers that see all tokens, and this
    /// for the others.
    rope_local_base_freq: Option<f64>,
    rope_scaling: Option<RopeFields>,
}

impl Raw {
    fn check_supported(&self, path: &Path) -> Result<()> {
        let refuse = |what: &str, field: &str, value: &str| {
            let why = format!("{} has {field} {value}", path.display());
            Err(Error::unsupported(what, why))
        };
        if self.use_bidirectional_attention == Some(true) {
            return refuse("attention to later tokens", "use_bidirectional_attention", "true");
        }
        match self.final_logit_softcapping {
            Some(cap) => refuse("bounded logits", "final_logit_softcapping", &cap.to_string()),
            None => Ok(()),
        }
    }
}

impl DecoderConfig for Config {
    const MODEL_TYPES: &'static [&'static str] = &["gemma3_text"];
    const GGUF: &'static [(&'static str, GgufNames)] = &[("gemma3", names::GGUF)];

    fn read(json: &ConfigJson<'_>, _: &mut Vec<String>) -> Result<Self> {
        let (raw, path) = (json.parse::<Raw>()?, json.path);
        json.check_only([("hidden_activation", json!("gelu_pytorch_tanh"))])?;
        raw.check_supported(path)?;
        let mut shared = SlidingConfig::from_json(json, &DEFAULTS)?;
        let max_positions = shared.max_positions;
        let (full, local_theta) = match &raw.rope_parameters {
            Some(ropes) => (Some(&ropes.full_attention), ropes.local_theta(path, max_positions)?),
            None => (raw.rope_scaling.as_ref(), None),
        };
        if let Some(rope) = full {
            shared.rope_scaling = rope.scaling(path, max_positions, None)?;
        }
        let theta = full.and_then(|rope| rope.rope_theta).or(raw.rope_theta);
        shared.rope_theta = theta.unwrap_or(DEFAULTS.rope_theta);
        Ok(Self {
            query_scalar: raw.query_pre_attn_scalar.unwrap_or(shared.head_dim as f64),
            softcap: raw.attn_logit_softcapping,
            local_rope_theta: local_theta.or(raw.rope_local_base_freq).unwrap_or(LOCAL_THETA),
            shared,
        })
    }

    fn read_gguf(metadata: &Metadata<'_>, weights: &mut Weights) -> Result<Self> {
        let width = metadata.size("feed_forward_length")?;
        let n_kv_heads = metadata.optional_size("attention.head_count_kv")?;
        let shared = SlidingConfig::from_gguf(metadata, weights, width, n_kv_heads, &DEFAULTS)?;
        Ok(Self {
            // GGUF files do not contain it. Only the 27B model, which has 62 layers, differs from
            // `head_dim`.
            query_scalar: match shared.n_layers {
                62 => shared.hidden_size as f64 / shared.n_heads as f64,
                _ => shared.head_dim as f64,
            },
            softcap: None,
            local_rope_theta: metadata.float("rope.freq_base_swa")?.unwrap_or(LOCAL_THETA),
            shared,
        })
    }

    fn check(&self, path: &Path) -> Result<()> {
        self.shared.check(path)?;
        positive(path, "query_pre_attn_scalar", self.query_scalar)?;
        positive(path, "rope_local_base_freq", self.local_rope_theta)?;
        match self.softcap {
            Some(softcap) => positive(path, "attn_logit_softcapping", softcap.into()),
            None => Ok(()),
        }
    }

    fn spec(&self) -> ModelSpec {
        let head_dim = self.shared.head_dim;
        let mut options = AttentionOptions::default();
        if self.query_scalar != head_dim as f64 {
            options = options.with_scale(self.query_scalar.powf(-0.5) as f32);
        }
        if let Some(softcap) = self.softcap {
            options = options.with_softcap(softcap);
        }
        let local = Rope::new(head_dim, self.local_rope_theta, &RopeScaling::Default);
        self.shared.spec(self.shared.layer().with_options(options), Some(local))
    }

    fn norm_epsilon(&self) -> f64 {
        self.shared.norm_epsilon
    }

    fn embedding_scale(&self) -> Option<f64> {
        Some((self.shared.hidden_size as f64).sqrt())
    }

    fn tied_head(&self) -> bool {
        self.shared.tied_head
    }

    /// Returns the fields that [`read`](Self::read) reads. Both old and new versions of the
    /// transformers library read them.
    fn to_json(&self, _: &Path) -> Result<Map<String, Value>> {
        Ok(self.shared.to_json(json!({
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": self.softcap,
            "final_logit_softcapping": null,
            "query_pre_attn_scalar": self.query_scalar,
            "rope_local_base_freq": self.local_rope_theta,
        })))
    }
}
