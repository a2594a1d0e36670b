//! The configuration of Gemma 3, read from `config.json` or a GGUF file.

use std::{collections::BTreeSet, path::Path};

use kv_cubecl::AttentionOptions;
use serde::Deserialize;
use serde_json::{Map, Value, json};

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
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Layers.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Channels per head. Heads times channels need not equal the width of the residual stream.
    pub head_dim: usize,
    /// Attention scores are multiplied by its inverse square root.
    pub query_scalar: f64,
    /// Bound of the attention scores, if any.
    pub softcap: Option<f32>,
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
    /// Base of the rope frequencies of layers that see all tokens.
    pub rope_theta: f64,
    /// Scaling of these frequencies.
    pub rope_scaling: RopeScaling,
    /// Base of the rope frequencies of the other layers.
    pub local_rope_theta: f64,
}

/// The rope bases of the published models.
const THETA: f64 = 1e6;
const LOCAL_THETA: f64 = 1e4;
/// By default every sixth layer sees all tokens.
const PATTERN: usize = 6;

#[derive(Deserialize)]
struct Raw {
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f64>,
    hidden_activation: Option<String>,
    attention_bias: Option<bool>,
    attn_logit_softcapping: Option<f32>,
    final_logit_softcapping: Option<f32>,
    use_bidirectional_attention: Option<bool>,
    query_pre_attn_scalar: Option<f64>,
    tie_word_embeddings: Option<bool>,
    sliding_window: Option<usize>,
    sliding_window_pattern: Option<usize>,
    layer_types: Option<Vec<String>>,
    rope_theta: Option<f64>,
    rope_local_base_freq: Option<f64>,
    rope_scaling: Option<RopeFields>,
    rope_parameters: Option<RopeByKind>,
}

/// The ropes by the kind of layer. Older files have `rope_theta` and `rope_scaling` for layers that
/// see all tokens, and `rope_local_base_freq` for the others.
#[derive(Deserialize)]
struct RopeByKind {
    full_attention: RopeFields,
    sliding_attention: RopeFields,
}

impl Raw {
    fn check_supported(&self, path: &Path) -> Result<()> {
        let refuse = |what: &str, field: &str, value: &str| {
            let why = format!("{} has {field} {value}", path.display());
            Err(Error::unsupported(what, why))
        };
        let act = self.hidden_activation.as_deref().unwrap_or("gelu_pytorch_tanh");
        if act != "gelu_pytorch_tanh" {
            return refuse("activation", "hidden_activation", act);
        }
        if self.use_bidirectional_attention == Some(true) {
            return refuse("attention to later tokens", "use_bidirectional_attention", "true");
        }
        match self.final_logit_softcapping {
            Some(cap) => refuse("bounded logits", "final_logit_softcapping", &cap.to_string()),
            None => Ok(()),
        }
    }
}

/// Returns every `pattern`-th layer; these see all tokens.
fn every(path: &Path, field: &str, pattern: usize, n_layers: usize) -> Result<BTreeSet<usize>> {
    match pattern {
        0 => Err(Error::config(path, field, 0, "must be at least 1")),
        _ => Ok((pattern - 1..n_layers).step_by(pattern).collect()),
    }
}

impl Config {
    /// Reads `config.json`.
    pub(super) fn from_json(json: &ConfigJson<'_>) -> Result<Self> {
        let (raw, path) = (json.parse::<Raw>()?, json.path);
        raw.check_supported(path)?;
        let n_layers = required(path, "num_hidden_layers", raw.num_hidden_layers)?;
        let n_layers = layers(path, "num_hidden_layers", n_layers)?;
        let n_heads = required(path, "num_attention_heads", raw.num_attention_heads)?;
        let max_positions = required(path, "max_position_embeddings", raw.max_position_embeddings)?;
        let head_dim = required(path, "head_dim", raw.head_dim)?;
        let full_layers = match &raw.layer_types {
            Some(types) => full_layers(path, types, n_layers)?,
            None => {
                let pattern = raw.sliding_window_pattern.unwrap_or(PATTERN);
                every(path, "sliding_window_pattern", pattern, n_layers)?
            }
        };
        let (full, local) = match raw.rope_parameters {
            Some(RopeByKind { full_attention, sliding_attention }) => {
                (Some(full_attention), Some(sliding_attention))
            }
            None => (raw.rope_scaling, None),
        };
        let scaling = |rope: Option<&RopeFields>| match rope {
            Some(rope) => rope.scaling(path, max_positions, None),
            None => Ok(RopeScaling::Default),
        };
        if scaling(local.as_ref())? != RopeScaling::Default {
            let why =
                format!("{} has it; only layers that see all tokens support it", path.display());
            return Err(Error::unsupported("scaled rope of layers with a sliding window", why));
        }
        let theta = |rope: Option<&RopeFields>, old: Option<f64>, default| {
            rope.and_then(|rope| rope.rope_theta).or(old).unwrap_or(default)
        };
        let config = Self {
            vocab_size: required(path, "vocab_size", raw.vocab_size)?,
            hidden_size: required(path, "hidden_size", raw.hidden_size)?,
            intermediate_size: required(path, "intermediate_size", raw.intermediate_size)?,
            n_layers,
            n_heads,
            n_kv_heads: raw.num_key_value_heads.unwrap_or(n_heads),
            head_dim,
            query_scalar: raw.query_pre_attn_scalar.unwrap_or(head_dim as f64),
            softcap: raw.attn_logit_softcapping,
            sliding_window: required(path, "sliding_window", raw.sliding_window)?,
            full_layers,
            max_positions,
            norm_epsilon: raw.rms_norm_eps.unwrap_or(1e-6),
            attention_bias: raw.attention_bias.unwrap_or(false),
            tied_head: raw.tie_word_embeddings.unwrap_or(true),
            rope_theta: theta(full.as_ref(), raw.rope_theta, THETA),
            rope_scaling: scaling(full.as_ref())?,
            local_rope_theta: theta(local.as_ref(), raw.rope_local_base_freq, LOCAL_THETA),
        };
        config.check(path)?;
        Ok(config)
    }

    /// Reads the metadata of a GGUF file and takes the tensors of the rope.
    pub(super) fn from_gguf(metadata: &Metadata<'_>, weights: &mut Weights) -> Result<Self> {
        let path = metadata.path();
        let block_count = metadata.size("block_count")?;
        let n_layers = layers(path, &metadata.key("block_count"), block_count)?;
        let (hidden_size, n_heads) =
            (metadata.size("embedding_length")?, metadata.size("attention.head_count")?);
        let head_dim = metadata.size("attention.key_length")?;
        let max_positions = metadata.size("context_length")?;
        let rope_theta = metadata.float("rope.freq_base")?.unwrap_or(THETA);
        let pattern = metadata.optional_size("attention.sliding_window_pattern")?;
        let pattern_key = metadata.key("attention.sliding_window_pattern");
        let config = Self {
            vocab_size: weights.rows("embed_tokens.weight")?,
            hidden_size,
            intermediate_size: metadata.size("feed_forward_length")?,
            n_layers,
            n_heads,
            n_kv_heads: metadata.optional_size("attention.head_count_kv")?.unwrap_or(n_heads),
            head_dim,
            // GGUF files do not contain it. Only the 27B model, which has 62 layers, differs from
            // `head_dim`.
            query_scalar: match n_layers {
                62 => hidden_size as f64 / n_heads as f64,
                _ => head_dim as f64,
            },
            softcap: None,
            sliding_window: metadata.size("attention.sliding_window")?,
            full_layers: every(path, &pattern_key, pattern.unwrap_or(PATTERN), n_layers)?,
            max_positions,
            norm_epsilon: metadata.float("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-6),
            attention_bias: weights.contains("layers.0.self_attn.q_proj.bias"),
            tied_head: !weights.contains("lm_head.weight"),
            rope_theta,
            rope_scaling: rope_config::from_gguf(
                metadata,
                head_dim,
                rope_theta,
                max_positions,
                weights,
            )?,
            local_rope_theta: metadata.float("rope.freq_base_swa")?.unwrap_or(LOCAL_THETA),
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
        sizes.check(path, &[("sliding_window", self.sliding_window)])?;
        sizes.check_even_head(path)?;
        positive(path, "query_pre_attn_scalar", self.query_scalar)?;
        positive(path, "rope_theta", self.rope_theta)?;
        positive(path, "rope_local_base_freq", self.local_rope_theta)?;
        positive(path, "rms_norm_eps", self.norm_epsilon)?;
        if let Some(softcap) = self.softcap {
            positive(path, "attn_logit_softcapping", softcap.into())?;
        }
        rope_config::check(path, &self.rope_scaling, self.head_dim)
    }
}

impl DecoderConfig for Config {
    fn spec(&self) -> ModelSpec {
        let mut options = AttentionOptions::default();
        if self.query_scalar != self.head_dim as f64 {
            options = options.with_scale(self.query_scalar.powf(-0.5) as f32);
        }
        if let Some(softcap) = self.softcap {
            options = options.with_softcap(softcap);
        }
        let layer = LayerSpec::new(self.n_heads, self.n_kv_heads, self.head_dim);
        let layer = layer.with_options(options);
        // A window as long as the context hides nothing.
        let window = Some(self.sliding_window).filter(|&window| window < self.max_positions);
        let layers = (0..self.n_layers).map(|i| match self.full_layers.contains(&i) {
            true => layer.with_rope(Some(0)),
            false => layer.with_rope(Some(1)).with_sliding_window(window),
        });
        let ropes = vec![
            Rope::new(self.head_dim, self.rope_theta, &self.rope_scaling),
            Rope::new(self.head_dim, self.local_rope_theta, &RopeScaling::Default),
        ];
        let Self { vocab_size, hidden_size, max_positions, .. } = *self;
        ModelSpec::new(vocab_size, hidden_size, max_positions, layers.collect()).with_ropes(ropes)
    }

    fn norm_epsilon(&self) -> f64 {
        self.norm_epsilon
    }

    fn tied_head(&self) -> bool {
        self.tied_head
    }

    fn embedding_scale(&self) -> Option<f64> {
        Some((self.hidden_size as f64).sqrt())
    }

    /// Returns the fields of `config.json` that `from_json` reads. Both old and new versions of the
    /// transformers library read them.
    fn to_json(&self, _: &Path) -> Result<Map<String, Value>> {
        let sizes = self.sizes();
        let fields = json!({
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "rms_norm_eps": self.norm_epsilon,
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": self.attention_bias,
            "attn_logit_softcapping": self.softcap,
            "final_logit_softcapping": null,
            "query_pre_attn_scalar": self.query_scalar,
            "tie_word_embeddings": self.tied_head,
            "sliding_window": self.sliding_window,
            "layer_types": sizes.layer_types(&self.full_layers),
            "rope_theta": self.rope_theta,
            "rope_local_base_freq": self.local_rope_theta,
            "rope_scaling": rope_config::to_json(&self.rope_scaling, self.max_positions),
        });
        Ok(sizes.to_json(fields))
    }
}
