//! [`Config`] as the configuration of a decoder.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{Config, config::Dialect, names, resolve::Raw};
use crate::{
    checkpoint::Weights,
    error::{Error, Result},
    family::ConfigJson,
    fields::{kv_heads, positive, sizes},
    gguf::{GgufNames, Metadata},
    nn::Rope,
    rope_config,
    spec::{LayerSpec, ModelSpec},
    stack::{DecoderConfig, LLAMA_GGUF},
};

impl DecoderConfig for Config {
    const MODEL_TYPES: &'static [&'static str] =
        &["llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3"];
    const GGUF: &'static [(&'static str, GgufNames)] = &[
        ("llama", LLAMA_GGUF),
        ("phi3", names::GGUF_PHI3),
        ("qwen2", LLAMA_GGUF),
        ("qwen3", LLAMA_GGUF),
        ("smollm3", LLAMA_GGUF),
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
        kv_heads(path, ("num_key_value_heads", n_kv_heads), n_heads)?;
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
            let layer = attention.with_sliding_window(window).with_rope(rope);
            layer.with_key_bias(self.qkv_bias)
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

    /// Returns the fields that [`read`](Self::read) reads.
    fn to_json(&self, path: &Path) -> Result<Map<String, Value>> {
        match self.dialect() {
            Some(dialect) => Ok(self.json_of(dialect)),
            None => Err(self.unsaved(path)),
        }
    }
}

impl Config {
    /// Returns the fields of Mistral, for families that have its attention.
    ///
    /// # Errors
    /// Fails for a configuration that Mistral cannot have.
    pub(crate) fn to_mistral_json(&self, path: &Path) -> Result<Map<String, Value>> {
        match self.is_mistral() {
            true => Ok(self.json_of(Dialect::Mistral)),
            false => Err(self.unsaved(path)),
        }
    }

    /// Returns the error of a configuration that no family has.
    fn unsaved(&self, path: &Path) -> Error {
        let what = format!(
            "combination of qkv_bias {}, output_bias {}, mlp_bias {}, rotary_dim {} of head_dim \
             {} in a saved model",
            self.qkv_bias,
            self.output_bias,
            self.mlp_bias,
            self.rotary_dim,
            self.head_dim(),
        );
        let why = format!("{}: no Hugging Face family has it", path.display());
        Error::unsupported(what, why)
    }

    /// Returns the fields of `config.json`. Both old and new versions of the transformers library
    /// read them.
    fn json_of(&self, dialect: Dialect) -> Map<String, Value> {
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
        let Value::Object(fields) = fields else { return of_dialect.collect() };
        fields.into_iter().chain(of_dialect).collect()
    }
}
