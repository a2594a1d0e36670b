//! The configuration of gpt-oss, read from `config.json` or a GGUF file.

use std::{collections::BTreeSet, path::Path};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::experts::ALPHA;
use crate::{
    ConfigJson, DecoderConfig, Error, LayerSpec, ModelSpec, Result,
    checkpoint::Weights,
    fields::{DecoderSizes, full_layers, layers, positive, required},
    gguf::Metadata,
    nn::{Rope, RopeScaling},
    rope_config::{self, RopeFields},
};

/// The configuration of a model, with all defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of an expert.
    pub intermediate_size: usize,
    /// Layers.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Experts per layer.
    pub n_experts: usize,
    /// Experts that compute each token.
    pub experts_per_token: usize,
    /// Bound of the values inside an expert.
    pub swiglu_limit: f64,
    /// Sliding window of the layers outside [`full_layers`](Self::full_layers), in tokens.
    pub sliding_window: usize,
    /// Layers, counted from 0, that see all tokens.
    pub full_layers: BTreeSet<usize>,
    /// The longest context.
    pub max_positions: usize,
    /// Epsilon of the norms.
    pub norm_epsilon: f64,
    /// Biases of the projections of attention.
    pub attention_bias: bool,
    /// Use of the token embedding as output projection.
    pub tied_head: bool,
    /// Base of the rope frequencies.
    pub rope_theta: f64,
    /// Scaling of the rope frequencies.
    pub rope_scaling: RopeScaling,
}

/// The clamp and the rope base of the published models.
const LIMIT: f64 = 7.0;
const THETA: f64 = 150_000.0;

#[derive(Deserialize)]
struct Raw {
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    num_local_experts: Option<usize>,
    #[serde(alias = "experts_per_token")]
    num_experts_per_tok: Option<usize>,
    swiglu_limit: Option<f64>,
    swiglu_alpha: Option<f64>,
    hidden_act: Option<String>,
    sliding_window: Option<usize>,
    layer_types: Option<Vec<String>>,
    max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f64>,
    attention_bias: Option<bool>,
    tie_word_embeddings: Option<bool>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeFields>,
    rope_parameters: Option<RopeFields>,
}

/// Returns every second layer; by default these see all tokens.
fn alternating(n_layers: usize) -> BTreeSet<usize> {
    (1..n_layers).step_by(2).collect()
}

impl Config {
    /// Reads `config.json`.
    pub(super) fn from_json(json: &ConfigJson<'_>) -> Result<Self> {
        let (raw, path) = (json.parse::<Raw>()?, json.path);
        let act = raw.hidden_act.as_deref().unwrap_or("silu");
        if act != "silu" {
            let why = format!("{} has hidden_act {act}; only silu is supported", path.display());
            return Err(Error::unsupported("activation", why));
        }
        if let Some(alpha) = raw.swiglu_alpha.filter(|alpha| *alpha != ALPHA) {
            return Err(Error::config(path, "swiglu_alpha", alpha, format!("must be {ALPHA}")));
        }
        let n_layers = required(path, "num_hidden_layers", raw.num_hidden_layers)?;
        let n_layers = layers(path, "num_hidden_layers", n_layers)?;
        let max_positions = required(path, "max_position_embeddings", raw.max_position_embeddings)?;
        let n_heads = required(path, "num_attention_heads", raw.num_attention_heads)?;
        // Without a rope type the transformers library assumes YaRN, so the file is ambiguous.
        let says = |rope: &&RopeFields| rope.rope_type.is_some();
        let new_rope = raw.rope_parameters.as_ref().filter(says);
        let old_rope = raw.rope_scaling.as_ref().filter(says);
        if raw.rope_theta.is_none() && new_rope.or(old_rope).is_none() {
            let rule = "must have a rope_type, as yarn or default";
            return Err(Error::config(path, "rope_parameters", "missing", rule));
        }
        let theta = new_rope.and_then(|rope| rope.rope_theta).or(raw.rope_theta);
        let config = Self {
            vocab_size: required(path, "vocab_size", raw.vocab_size)?,
            hidden_size: required(path, "hidden_size", raw.hidden_size)?,
            intermediate_size: required(path, "intermediate_size", raw.intermediate_size)?,
            n_layers,
            n_heads,
            n_kv_heads: raw.num_key_value_heads.unwrap_or(n_heads),
            head_dim: required(path, "head_dim", raw.head_dim)?,
            n_experts: required(path, "num_local_experts", raw.num_local_experts)?,
            experts_per_token: required(path, "num_experts_per_tok", raw.num_experts_per_tok)?,
            swiglu_limit: raw.swiglu_limit.unwrap_or(LIMIT),
            sliding_window: required(path, "sliding_window", raw.sliding_window)?,
            full_layers: match &raw.layer_types {
                Some(types) => full_layers(path, types, n_layers)?,
                None => alternating(n_layers),
            },
            max_positions,
            norm_epsilon: raw.rms_norm_eps.unwrap_or(1e-5),
            attention_bias: raw.attention_bias.unwrap_or(true),
            tied_head: raw.tie_word_embeddings.unwrap_or(false),
            rope_theta: theta.unwrap_or(THETA),
            rope_scaling: match new_rope.or(old_rope) {
                Some(rope) => rope.scaling(path, max_positions, None)?,
                None => RopeScaling::Default,
            },
        };
        config.check(path)?;
        Ok(config)
    }

    /// Reads the metadata of a GGUF file and takes the tensors of the rope.
    pub(super) fn from_gguf(metadata: &Metadata<'_>, weights: &mut Weights) -> Result<Self> {
        let path = metadata.path();
        let block_count = metadata.size("block_count")?;
        let n_layers = layers(path, &metadata.key("block_count"), block_count)?;
        let n_heads = metadata.size("attention.head_count")?;
        let head_dim = metadata.size("attention.key_length")?;
        let max_positions = metadata.size("context_length")?;
        let rope_theta = metadata.float("rope.freq_base")?.unwrap_or(THETA);
        let mut rope_scaling =
            rope_config::from_gguf(metadata, head_dim, rope_theta, max_positions, weights)?;
        if let RopeScaling::Yarn { truncate, .. } = &mut rope_scaling {
            // The published models were trained without truncation, which GGUF files do not
            // contain.
            *truncate = false;
        }
        let config = Self {
            vocab_size: weights.rows("embed_tokens.weight")?,
            hidden_size: metadata.size("embedding_length")?,
            intermediate_size: metadata.size("expert_feed_forward_length")?,
            n_layers,
            n_heads,
            n_kv_heads: metadata.optional_size("attention.head_count_kv")?.unwrap_or(n_heads),
            head_dim,
            n_experts: metadata.size("expert_count")?,
            experts_per_token: metadata.size("expert_used_count")?,
            swiglu_limit: LIMIT,
            sliding_window: metadata.size("attention.sliding_window")?,
            full_layers: alternating(n_layers),
            max_positions,
            norm_epsilon: metadata.float("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-5),
            attention_bias: weights.contains("layers.0.self_attn.q_proj.bias"),
            tied_head: !weights.contains("lm_head.weight"),
            rope_theta,
            rope_scaling,
        };
        config.check(path)?;
        Ok(config)
    }

    fn sizes(&self) -> DecoderSizes {
        let Self { vocab_size, hidden_size, intermediate_size, n_layers, .. } = *self;
        let Self { n_heads, n_kv_heads, head_dim, max_positions, .. } = *self;
        DecoderSizes {
            vocab_size,
            hidden_size,
            intermediate_size,
            n_layers,
            n_heads,
            n_kv_heads,
            head_dim,
            max_positions,
        }
    }

    fn check(&self, path: &Path) -> Result<()> {
        let sizes = self.sizes();
        sizes.check(
            path,
            &[
                ("num_local_experts", self.n_experts),
                ("num_experts_per_tok", self.experts_per_token),
                ("sliding_window", self.sliding_window),
            ],
        )?;
        sizes.check_even_head(path)?;
        if self.experts_per_token > self.n_experts {
            let rule = format!("must be at most num_local_experts {}", self.n_experts);
            return Err(Error::config(path, "num_experts_per_tok", self.experts_per_token, rule));
        }
        positive(path, "swiglu_limit", self.swiglu_limit)?;
        positive(path, "rope_theta", self.rope_theta)?;
        positive(path, "rms_norm_eps", self.norm_epsilon)?;
        rope_config::check(path, &self.rope_scaling, self.head_dim)
    }
}

impl DecoderConfig for Config {
    fn spec(&self) -> ModelSpec {
        let layer = LayerSpec::new(self.n_heads, self.n_kv_heads, self.head_dim).with_rope(Some(0));
        // A window as long as the context hides nothing.
        let window = Some(self.sliding_window).filter(|&window| window < self.max_positions);
        let layers = (0..self.n_layers).map(|i| match self.full_layers.contains(&i) {
            true => layer,
            false => layer.with_sliding_window(window),
        });
        let rope = Rope::new(self.head_dim, self.rope_theta, &self.rope_scaling);
        let Self { vocab_size, hidden_size, max_positions, .. } = *self;
        ModelSpec::new(vocab_size, hidden_size, max_positions, layers.collect())
            .with_ropes(vec![rope])
    }

    fn norm_epsilon(&self) -> f64 {
        self.norm_epsilon
    }

    fn tied_head(&self) -> bool {
        self.tied_head
    }

    /// Returns the fields of `config.json` that `from_json` reads.
    fn to_json(&self, _: &Path) -> Result<Map<String, Value>> {
        let sizes = self.sizes();
        let fields = json!({
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "num_local_experts": self.n_experts,
            "num_experts_per_tok": self.experts_per_token,
            "swiglu_limit": self.swiglu_limit,
            "hidden_act": "silu",
            "sliding_window": self.sliding_window,
            "layer_types": sizes.layer_types(&self.full_layers),
            "rms_norm_eps": self.norm_epsilon,
            "attention_bias": self.attention_bias,
            "tie_word_embeddings": self.tied_head,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope_config::to_json(&self.rope_scaling, self.max_positions),
        });
        Ok(sizes.to_json(fields))
    }
}
