//! [`SlidingConfig`]: the configuration of families in which some layers have a sliding window.

use std::{collections::BTreeSet, path::Path};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    checkpoint::Weights,
    error::{Error, Result},
    family::ConfigJson,
    fields::{DecoderSizes, even, extended, full_layers, layers, positive, required},
    gguf::Metadata,
    nn::{Rope, RopeScaling},
    rope_config::{self, RopeFields},
    spec::{LayerSpec, ModelSpec},
};

/// The fields that Gemma 3 and gpt-oss have in common, with all defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct SlidingConfig {
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP, or of an expert.
    pub intermediate_size: usize,
    /// Layers.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Channels per head. Heads times channels need not equal the width of the residual stream.
    pub head_dim: usize,
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
}

/// The values of a family for fields that a file does not have.
pub(crate) struct Defaults {
    /// The interval of layers that see all tokens.
    pub(crate) pattern: usize,
    /// True if files can contain the interval.
    pub(crate) reads_pattern: bool,
    pub(crate) norm_epsilon: f64,
    pub(crate) attention_bias: bool,
    pub(crate) tied_head: bool,
    pub(crate) rope_theta: f64,
}

/// The ropes by the kind of layer, in Gemma's files.
#[derive(Deserialize)]
pub(crate) struct RopeByKind {
    pub(crate) full_attention: RopeFields,
    sliding_attention: RopeFields,
}

impl RopeByKind {
    /// Returns the rope base of layers with a sliding window, whose rope must have no scaling.
    pub(crate) fn local_theta(&self, path: &Path, max_positions: usize) -> Result<Option<f64>> {
        let local = &self.sliding_attention;
        let partial = local.partial_rotary_factor.unwrap_or(1.0);
        if local.scaling(path, max_positions, None)? != RopeScaling::Default || partial != 1.0 {
            let rule = "only layers that see all tokens support it";
            let why = format!("{} has it; {rule}", path.display());
            return Err(Error::unsupported("scaled rope of layers with a sliding window", why));
        }
        Ok(local.rope_theta)
    }
}

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
    attention_bias: Option<bool>,
    tie_word_embeddings: Option<bool>,
    sliding_window: Option<usize>,
    sliding_window_pattern: Option<usize>,
    layer_types: Option<Vec<String>>,
}

/// Returns every `pattern`-th layer.
fn every(path: &Path, field: &str, pattern: usize, n_layers: usize) -> Result<BTreeSet<usize>> {
    match pattern {
        0 => Err(Error::config(path, field, 0, "must be at least 1")),
        _ => Ok((pattern - 1..n_layers).step_by(pattern).collect()),
    }
}

impl SlidingConfig {
    /// Reads `config.json`, except for the rope.
    pub(crate) fn from_json(json: &ConfigJson<'_>, defaults: &Defaults) -> Result<Self> {
        let (raw, path) = (json.parse::<Raw>()?, json.path);
        let n_layers = required(path, "num_hidden_layers", raw.num_hidden_layers)?;
        let n_layers = layers(path, "num_hidden_layers", n_layers)?;
        let n_heads = required(path, "num_attention_heads", raw.num_attention_heads)?;
        let pattern = raw.sliding_window_pattern.filter(|_| defaults.reads_pattern);
        let pattern = pattern.unwrap_or(defaults.pattern);
        Ok(Self {
            vocab_size: required(path, "vocab_size", raw.vocab_size)?,
            hidden_size: required(path, "hidden_size", raw.hidden_size)?,
            intermediate_size: required(path, "intermediate_size", raw.intermediate_size)?,
            n_layers,
            n_heads,
            n_kv_heads: raw.num_key_value_heads.unwrap_or(n_heads),
            head_dim: required(path, "head_dim", raw.head_dim)?,
            sliding_window: required(path, "sliding_window", raw.sliding_window)?,
            full_layers: match &raw.layer_types {
                Some(types) => full_layers(path, types, n_layers)?,
                None => every(path, "sliding_window_pattern", pattern, n_layers)?,
            },
            max_positions: required(path, "max_position_embeddings", raw.max_position_embeddings)?,
            norm_epsilon: raw.rms_norm_eps.unwrap_or(defaults.norm_epsilon),
            attention_bias: raw.attention_bias.unwrap_or(defaults.attention_bias),
            tied_head: raw.tie_word_embeddings.unwrap_or(defaults.tied_head),
            rope_theta: defaults.rope_theta,
            rope_scaling: RopeScaling::Default,
        })
    }

    /// Reads the metadata of a GGUF file and takes the tensors of the rope. `width` is the width of
    /// the MLP, or of an expert.
    pub(crate) fn from_gguf(
        metadata: &Metadata<'_>,
        weights: &mut Weights,
        width: usize,
        n_kv_heads: Option<usize>,
        defaults: &Defaults,
    ) -> Result<Self> {
        let path = metadata.path();
        let n_layers = metadata.size("block_count")?;
        let n_layers = layers(path, &metadata.key("block_count"), n_layers)?;
        let n_heads = metadata.size("attention.head_count")?;
        let head_dim = metadata.size("attention.key_length")?;
        metadata.agrees("rope.dimension_count", head_dim, "the attention.key_length")?;
        metadata.agrees("attention.value_length", head_dim, "the attention.key_length")?;
        let max_positions = metadata.size("context_length")?;
        let rope_theta = metadata.float("rope.freq_base")?.unwrap_or(defaults.rope_theta);
        let pattern_field = "attention.sliding_window_pattern";
        let pattern = match defaults.reads_pattern {
            true => metadata.optional_size(pattern_field)?,
            false => None,
        };
        let pattern = pattern.unwrap_or(defaults.pattern);
        let epsilon = metadata.float("attention.layer_norm_rms_epsilon")?;
        Ok(Self {
            vocab_size: weights.rows("embed_tokens.weight")?,
            hidden_size: metadata.size("embedding_length")?,
            intermediate_size: width,
            n_layers,
            n_heads,
            n_kv_heads: n_kv_heads.unwrap_or(n_heads),
            head_dim,
            sliding_window: metadata.size("attention.sliding_window")?,
            full_layers: every(path, &metadata.key(pattern_field), pattern, n_layers)?,
            max_positions,
            norm_epsilon: epsilon.unwrap_or(defaults.norm_epsilon),
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
        })
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

    /// Checks all fields except the rope scaling.
    pub(crate) fn check(&self, path: &Path) -> Result<()> {
        let sizes = self.sizes();
        sizes.check(path, &[("sliding_window", self.sliding_window)])?;
        even(path, "head_dim", self.head_dim)?;
        positive(path, "rope_theta", self.rope_theta)?;
        positive(path, "rms_norm_eps", self.norm_epsilon)?;
        rope_config::check(path, &self.rope_scaling, self.head_dim)
    }

    /// Describes the model. All layers are like `layer`, but those outside of
    /// [`full_layers`](Self::full_layers) have the sliding window and the rope `local`, if there is
    /// one.
    pub(crate) fn spec(&self, layer: LayerSpec, local: Option<Rope>) -> ModelSpec {
        // A window as long as the context hides nothing.
        let window = Some(self.sliding_window).filter(|&window| window < self.max_positions);
        let local_rope = Some(usize::from(local.is_some()));
        let layers = (0..self.n_layers).map(|i| match self.full_layers.contains(&i) {
            true => layer.with_rope(Some(0)),
            false => layer.with_rope(local_rope).with_sliding_window(window),
        });
        let rope = Rope::new(self.head_dim, self.rope_theta, &self.rope_scaling);
        let Self { vocab_size, hidden_size, max_positions, .. } = *self;
        ModelSpec::new(vocab_size, hidden_size, max_positions, layers.collect())
            .with_ropes([rope].into_iter().chain(local).collect())
    }

    /// Describes the attention of a layer.
    pub(crate) fn layer(&self) -> LayerSpec {
        LayerSpec::new(self.n_heads, self.n_kv_heads, self.head_dim)
            .with_key_bias(self.attention_bias)
    }

    /// Returns the names and row counts of the query, key and value projections.
    pub(crate) fn qkv(&self) -> [(&'static str, usize); 3] {
        let kv_rows = self.n_kv_heads * self.head_dim;
        [
            ("self_attn.q_proj", self.n_heads * self.head_dim),
            ("self_attn.k_proj", kv_rows),
            ("self_attn.v_proj", kv_rows),
        ]
    }

    /// Returns the fields of `config.json`, with those in the object `more`.
    pub(crate) fn to_json(&self, more: Value) -> Map<String, Value> {
        let sizes = self.sizes();
        let fields = json!({
            "rms_norm_eps": self.norm_epsilon,
            "attention_bias": self.attention_bias,
            "tie_word_embeddings": self.tied_head,
            "sliding_window": self.sliding_window,
            "layer_types": sizes.layer_types(&self.full_layers),
            "rope_theta": self.rope_theta,
            "rope_scaling": rope_config::to_json(&self.rope_scaling, self.max_positions),
        });
        extended(sizes.to_json(fields), more)
    }
}
