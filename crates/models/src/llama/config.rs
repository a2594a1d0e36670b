//! The configuration of the Llama family.

use std::{collections::BTreeSet, path::Path};

use serde_json::{Map, Value, json};

use super::{names, resolve::Raw};
use crate::{
    ConfigJson, DecoderConfig, Error, LayerSpec, ModelSpec, Result,
    checkpoint::Weights,
    fields::{FULL, SLIDING, positive, sizes},
    gguf::{GgufNames, Metadata},
    nn::{Rope, RopeScaling},
    rope_config,
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
    /// Heads of attention, and the sliding window of the layers that have one.
    pub attention: LayerSpec,
    /// Layers, counted from 0, that see all tokens even if [`attention`](Self::attention) has a
    /// sliding window.
    pub full_layers: BTreeSet<usize>,
    /// Layers without rope.
    pub layers_without_rope: BTreeSet<usize>,
    /// True if every head of queries and keys has a norm.
    pub qk_norms: bool,
    /// The longest context.
    pub max_positions: usize,
    /// Epsilon of the norms.
    pub norm_epsilon: f64,
    /// True if the QKV projection has a bias.
    pub qkv_bias: bool,
    /// True if the output projection of attention has a bias.
    pub output_bias: bool,
    /// True if the MLP has biases.
    pub mlp_bias: bool,
    /// True if the output projection is the token embedding.
    pub tied_head: bool,
    /// Channels of a head that rope covers.
    pub rotary_dim: usize,
    /// Base of the rope frequencies.
    pub rope_theta: f64,
    /// Scaling of the rope frequencies.
    pub rope_scaling: RopeScaling,
}

impl Config {
    /// Checks a configuration that was made in code.
    ///
    /// # Errors
    /// Fails with [`Error::Config`] naming the field as in `config.json`.
    pub fn validate(&self) -> Result<()> {
        self.check(Path::new("llama config"))
    }

    /// Returns the channels per head, which are equal for keys and values.
    pub(super) fn head_dim(&self) -> usize {
        self.attention.head_dim.keys
    }
}

/// The families of the transformers library that a [`Llama`](super::Llama) can be saved as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    Llama,
    /// Llama with a sliding window in every layer.
    Mistral,
    /// Has biases only in the projections of queries, keys and values.
    Qwen2,
    /// Has norms of queries and keys.
    Qwen3,
    /// Llama with layers without rope, or with a sliding window in some layers.
    SmolLm3,
    /// Has fused projections. It is the only one in which rope can cover a part of a head.
    Phi3,
}

impl Dialect {
    /// Returns `model_type` and the architecture.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Llama => ("llama", "LlamaForCausalLM"),
            Self::Mistral => ("mistral", "MistralForCausalLM"),
            Self::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
            Self::Qwen3 => ("qwen3", "Qwen3ForCausalLM"),
            Self::SmolLm3 => ("smollm3", "SmolLM3ForCausalLM"),
            Self::Phi3 => ("phi3", "Phi3ForCausalLM"),
        }
    }
}

impl Config {
    /// Returns the family that the model can be saved as, if there is one.
    pub(super) fn dialect(&self) -> Option<Dialect> {
        let (n_heads, head_dim) = (self.attention.n_heads, self.head_dim());
        let biases = (self.qkv_bias, self.output_bias, self.mlp_bias);
        let plain = biases == (false, false, false);
        let all_rope = self.layers_without_rope.is_empty();
        let windowed = self.attention.sliding_window.is_some();
        if self.rotary_dim < head_dim {
            let known =
                matches!(self.rope_scaling, RopeScaling::Default | RopeScaling::LongRope { .. });
            let alike = all_rope && self.full_layers.is_empty() && !self.qk_norms;
            let fits = n_heads * head_dim == self.hidden_size;
            return (known && alike && fits && plain).then_some(Dialect::Phi3);
        }
        match biases {
            (qkv, output, mlp) if self.qk_norms => {
                (qkv == output && !mlp && all_rope).then_some(Dialect::Qwen3)
            }
            (qkv, output, _) if qkv == output && all_rope && !windowed => Some(Dialect::Llama),
            _ if plain && all_rope && self.full_layers.is_empty() => Some(Dialect::Mistral),
            (qkv, output, _) if qkv == output => Some(Dialect::SmolLm3),
            (true, false, false) if all_rope => Some(Dialect::Qwen2),
            _ => None,
        }
    }

    /// Returns the kind of attention of every layer, as in `layer_types`.
    fn layer_types(&self) -> Vec<&'static str> {
        let windowed =
            |i| self.attention.sliding_window.is_some() && !self.full_layers.contains(&i);
        (0..self.n_layers).map(|i| if windowed(i) { SLIDING } else { FULL }).collect()
    }

    /// Returns the fields of `config.json` that not all dialects have.
    fn fields_of(&self, dialect: Dialect) -> Vec<(&'static str, Value)> {
        let mut fields = vec![];
        if dialect != Dialect::Phi3 {
            fields.push(("head_dim", json!(self.head_dim())));
        }
        if matches!(dialect, Dialect::Llama | Dialect::Qwen3 | Dialect::SmolLm3) {
            fields.push(("attention_bias", json!(self.qkv_bias)));
        }
        if matches!(dialect, Dialect::Llama | Dialect::SmolLm3) {
            fields.push(("mlp_bias", json!(self.mlp_bias)));
        }
        let window = self.attention.sliding_window;
        if dialect != Dialect::Llama {
            fields.push(("sliding_window", json!(window)));
        }
        if matches!(dialect, Dialect::Qwen2 | Dialect::Qwen3 | Dialect::SmolLm3) {
            fields.push(("use_sliding_window", json!(window.is_some())));
            fields.push(("layer_types", json!(self.layer_types())));
        }
        if dialect == Dialect::SmolLm3 {
            // 1 for a layer with rope.
            let with_rope = |i| u8::from(!self.layers_without_rope.contains(&i));
            let with_rope: Vec<_> = (0..self.n_layers).map(with_rope).collect();
            fields.push(("no_rope_layers", json!(with_rope)));
        }
        if dialect == Dialect::Phi3 {
            fields.push(("partial_rotary_factor", json!(self.rotary_factor())));
            if let RopeScaling::LongRope { original_max_positions, .. } = self.rope_scaling {
                let field = "original_max_position_embeddings";
                fields.push((field, json!(original_max_positions)));
            }
        }
        fields
    }

    /// Returns the fraction of a head that rope covers. Readers multiply it by `head_dim` and round
    /// down, and their parser may change its last digit; the fraction then still gives
    /// `rotary_dim`.
    fn rotary_factor(&self) -> f64 {
        let head_dim = self.head_dim() as f64;
        let exact = self.rotary_dim as f64 / head_dim;
        let found = |factor: f64| (factor * head_dim) as usize == self.rotary_dim;
        let read = serde_json::from_str(&exact.to_string()).unwrap_or(exact);
        if found(exact) && found(read) { exact } else { (self.rotary_dim as f64 + 0.5) / head_dim }
    }
}

impl DecoderConfig for Config {
    const MODEL_TYPES: &'static [&'static str] =
        &["llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3"];
    const GGUF: &'static [(&'static str, GgufNames)] = &[
        ("llama", names::GGUF),
        ("phi3", names::GGUF_PHI3),
        ("qwen2", names::GGUF),
        ("qwen3", names::GGUF),
        ("smollm3", names::GGUF),
    ];

    fn read(json: &ConfigJson<'_>, notes: &mut Vec<String>) -> Result<Self> {
        json.parse::<Raw>()?.resolve(json.path, notes)
    }

    fn read_gguf(metadata: &Metadata<'_>, weights: &mut Weights) -> Result<Self> {
        Self::from_gguf(metadata, weights)
    }

    fn check(&self, path: &Path) -> Result<()> {
        let LayerSpec { n_heads, n_kv_heads, head_dim: of_sides, .. } = self.attention;
        let head_dim = self.head_dim();
        let fields = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.n_layers),
            ("num_attention_heads", n_heads),
            ("num_key_value_heads", n_kv_heads),
            ("head_dim", head_dim),
            ("max_position_embeddings", self.max_positions),
            ("rotary_dim", self.rotary_dim),
        ];
        sizes(path, &fields)?;
        if !n_heads.is_multiple_of(n_kv_heads) {
            let rule = format!("does not divide num_attention_heads {n_heads}");
            return Err(Error::config(path, "num_key_value_heads", n_kv_heads, rule));
        }
        if of_sides != head_dim.into() {
            let rule = format!("must equal head_dim {head_dim} in this family");
            return Err(Error::config(path, "head_dim of values", of_sides.values, rule));
        }
        if self.attention.sliding_window == Some(0) {
            return Err(Error::config(path, "sliding_window", 0, "must be at least 1"));
        }
        for (field, layers) in
            [("full_layers", &self.full_layers), ("no_rope_layers", &self.layers_without_rope)]
        {
            if let Some(&layer) = layers.last().filter(|layer| **layer >= self.n_layers) {
                let rule = format!("the model has layers 0 to {}", self.n_layers - 1);
                return Err(Error::config(path, field, layer, rule));
            }
        }
        if !self.rotary_dim.is_multiple_of(2) || self.rotary_dim > head_dim {
            let rule = format!("must be even and at most head_dim {head_dim}");
            return Err(Error::config(path, "rotary_dim", self.rotary_dim, rule));
        }
        positive(path, "rope_theta", self.rope_theta)?;
        positive(path, "rms_norm_eps", self.norm_epsilon)?;
        rope_config::check(path, &self.rope_scaling, self.rotary_dim)
    }

    fn spec(&self) -> ModelSpec {
        let Self { vocab_size, hidden_size, max_positions, n_layers, attention, .. } = *self;
        let layer = |i: usize| {
            let window = attention.sliding_window.filter(|_| !self.full_layers.contains(&i));
            let rope = (!self.layers_without_rope.contains(&i)).then_some(0);
            attention.with_sliding_window(window).with_rope(rope)
        };
        let rope = Rope::new(self.rotary_dim, self.rope_theta, &self.rope_scaling);
        let layers = (0..n_layers).map(layer).collect();
        ModelSpec::new(vocab_size, hidden_size, max_positions, layers).with_ropes(vec![rope])
    }

    fn norm_epsilon(&self) -> f64 {
        self.norm_epsilon
    }

    fn tied_head(&self) -> bool {
        self.tied_head
    }

    /// Returns the fields that [`read`](Self::read) reads. Both old and new versions of the
    /// transformers library read them.
    fn to_json(&self, path: &Path) -> Result<Map<String, Value>> {
        let Some(dialect) = self.dialect() else {
            let what = format!(
                "combination of qkv_bias {}, output_bias {}, mlp_bias {}, rotary_dim {} of \
                 head_dim {} in a saved model",
                self.qkv_bias,
                self.output_bias,
                self.mlp_bias,
                self.rotary_dim,
                self.head_dim(),
            );
            let why = format!("{}: no Hugging Face family has it", path.display());
            return Err(Error::unsupported(what, why));
        };
        let (model_type, architecture) = dialect.names();
        let fields = json!({
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.attention.n_heads,
            "num_key_value_heads": self.attention.n_kv_heads,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_epsilon,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied_head,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope_config::to_json(&self.rope_scaling, self.max_positions),
        });
        let of_dialect = self.fields_of(dialect).into_iter();
        let of_dialect = of_dialect.map(|(field, value)| (field.to_string(), value));
        let Value::Object(fields) = fields else { return Ok(of_dialect.collect()) };
        Ok(fields.into_iter().chain(of_dialect).collect())
    }
}
