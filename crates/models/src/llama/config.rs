//! The configuration of the Llama family.

use std::{collections::BTreeSet, path::Path};

use serde_json::{Value, json};

use crate::{
    error::Result,
    fields::{FULL, SLIDING},
    nn::RopeScaling,
    spec::LayerSpec,
    stack::DecoderConfig,
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
    /// Fails with [`Error::Config`](crate::Error::Config) naming the field as in `config.json`.
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
    pub(super) fn names(self) -> (&'static str, &'static str) {
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
    /// Returns whether the attention of Mistral can have this configuration.
    pub(super) fn is_mistral(&self) -> bool {
        let biases = self.qkv_bias || self.output_bias || self.mlp_bias;
        let all_alike = self.layers_without_rope.is_empty() && self.full_layers.is_empty();
        self.rotary_dim == self.head_dim() && all_alike && !biases && !self.qk_norms
    }

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
            _ if self.is_mistral() => Some(Dialect::Mistral),
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
    pub(super) fn fields_of(&self, dialect: Dialect) -> Vec<(&'static str, Value)> {
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
    pub(crate) fn rotary_factor(&self) -> f64 {
        let head_dim = self.head_dim() as f64;
        let exact = self.rotary_dim as f64 / head_dim;
        let found = |factor: f64| (factor * head_dim) as usize == self.rotary_dim;
        let read = serde_json::from_str(&exact.to_string()).unwrap_or(exact);
        if found(exact) && found(read) { exact } else { (self.rotary_dim as f64 + 0.5) / head_dim }
    }
}
