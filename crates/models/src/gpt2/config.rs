//! The configuration of GPT-2, read from `config.json`.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::names::GGUF;
use crate::{
    checkpoint::Weights,
    error::{Error, Result},
    family::ConfigJson,
    fields::{head_dim, layers, positive, required, sizes},
    gguf::{GgufNames, Metadata},
    spec::{LayerSpec, ModelSpec},
    stack::DecoderConfig,
};

/// The MLP's nonlinearity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// The tanh approximation of GELU, which OpenAI trained GPT-2 with.
    GeluTanh,
    /// GELU.
    Gelu,
    /// ReLU.
    Relu,
}

/// The configuration of a model, with all defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// The longest context, equal to the number of learned positions.
    pub max_positions: usize,
    /// Width of the residual stream, `n_embd`.
    pub hidden_size: usize,
    /// Width of the MLP, `n_inner`.
    pub intermediate_size: usize,
    /// Layers.
    pub n_layers: usize,
    /// Heads of queries, of keys and of values.
    pub n_heads: usize,
    /// Epsilon of the norms.
    pub norm_epsilon: f64,
    /// The MLP's nonlinearity.
    pub activation: Activation,
    /// True if the output projection is the token embedding.
    pub tied_head: bool,
}

/// The fields that the transformers library writes.
#[derive(Deserialize)]
struct Raw {
    vocab_size: Option<usize>,
    n_embd: Option<usize>,
    n_inner: Option<usize>,
    n_layer: Option<usize>,
    n_head: Option<usize>,
    n_positions: Option<usize>,
    layer_norm_epsilon: Option<f64>,
    activation_function: Option<String>,
    tie_word_embeddings: Option<bool>,
    scale_attn_weights: Option<bool>,
    scale_attn_by_inverse_layer_idx: Option<bool>,
    add_cross_attention: Option<bool>,
}

impl Raw {
    fn resolve(self, path: &Path) -> Result<Config> {
        for (field, value, computed) in [
            ("scale_attn_weights", self.scale_attn_weights, true),
            ("scale_attn_by_inverse_layer_idx", self.scale_attn_by_inverse_layer_idx, false),
            ("add_cross_attention", self.add_cross_attention, false),
        ] {
            if value.is_some_and(|value| value != computed) {
                let why = format!("{} sets it; only {computed} is supported", path.display());
                return Err(Error::unsupported(format!("{field} {}", !computed), why));
            }
        }
        let hidden_size = required(path, "n_embd", self.n_embd)?;
        Ok(Config {
            vocab_size: required(path, "vocab_size", self.vocab_size)?,
            hidden_size,
            intermediate_size: self.n_inner.unwrap_or_else(|| hidden_size.saturating_mul(4)),
            n_layers: layers(path, "n_layer", required(path, "n_layer", self.n_layer)?)?,
            n_heads: required(path, "n_head", self.n_head)?,
            max_positions: required(path, "n_positions", self.n_positions)?,
            norm_epsilon: self.layer_norm_epsilon.unwrap_or(1e-5),
            activation: match self.activation_function.as_deref().unwrap_or("gelu_new") {
                "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Activation::GeluTanh,
                "gelu" => Activation::Gelu,
                "relu" => Activation::Relu,
                other => {
                    let why = format!("{} has {other}", path.display());
                    return Err(Error::unsupported("activation_function", why));
                }
            },
            tied_head: self.tie_word_embeddings.unwrap_or(true),
        })
    }
}

impl DecoderConfig for Config {
    const MODEL_TYPES: &'static [&'static str] = &["gpt2"];
    const GGUF: &'static [(&'static str, GgufNames)] = &[("gpt2", GGUF)];

    fn read(json: &ConfigJson<'_>, _: &mut Vec<String>) -> Result<Self> {
        json.parse::<Raw>()?.resolve(json.path)
    }

    fn read_gguf(metadata: &Metadata<'_>, weights: &mut Weights) -> Result<Self> {
        Ok(Self {
            vocab_size: weights.rows("wte.weight")?,
            hidden_size: metadata.size("embedding_length")?,
            intermediate_size: metadata.size("feed_forward_length")?,
            n_layers: layers(
                metadata.path(),
                &metadata.key("block_count"),
                metadata.size("block_count")?,
            )?,
            n_heads: metadata.size("attention.head_count")?,
            max_positions: metadata.size("context_length")?,
            norm_epsilon: metadata.float("attention.layer_norm_epsilon")?.unwrap_or(1e-5),
            activation: Activation::GeluTanh,
            tied_head: !weights.contains("lm_head.weight"),
        })
    }

    fn check(&self, path: &Path) -> Result<()> {
        let fields = [
            ("vocab_size", self.vocab_size),
            ("n_embd", self.hidden_size),
            ("n_inner", self.intermediate_size),
            ("n_layer", self.n_layers),
            ("n_head", self.n_heads),
            ("n_positions", self.max_positions),
        ];
        sizes(path, &fields)?;
        head_dim(path, ("n_embd", self.hidden_size), ("n_head", self.n_heads))?;
        positive(path, "layer_norm_epsilon", self.norm_epsilon)
    }

    fn spec(&self) -> ModelSpec {
        let Self { vocab_size, hidden_size, max_positions, n_layers, n_heads, .. } = *self;
        let layer = LayerSpec::new(n_heads, n_heads, hidden_size / n_heads).with_key_bias(true);
        ModelSpec::uniform(vocab_size, hidden_size, max_positions, n_layers, layer)
    }

    fn tied_head(&self) -> bool {
        self.tied_head
    }

    fn norm_epsilon(&self) -> f64 {
        self.norm_epsilon
    }

    /// Returns the fields that [`read`](Self::read) reads.
    fn to_json(&self, _: &Path) -> Result<Map<String, Value>> {
        let activation = match self.activation {
            Activation::GeluTanh => "gelu_new",
            Activation::Gelu => "gelu",
            Activation::Relu => "relu",
        };
        let fields = [
            ("architectures", json!(["GPT2LMHeadModel"])),
            ("model_type", json!("gpt2")),
            ("vocab_size", json!(self.vocab_size)),
            ("n_embd", json!(self.hidden_size)),
            ("n_inner", json!(self.intermediate_size)),
            ("n_layer", json!(self.n_layers)),
            ("n_head", json!(self.n_heads)),
            ("n_positions", json!(self.max_positions)),
            ("layer_norm_epsilon", json!(self.norm_epsilon)),
            ("activation_function", json!(activation)),
            ("tie_word_embeddings", json!(self.tied_head)),
        ]
        .map(|(key, value)| (key.to_string(), value));
        Ok(fields.into_iter().collect())
    }
}
