//! What a model of the Llama family is: its `config.json`, resolved once.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::{
    Error, LayerSpec, ModelSpec, Result,
    fields::{positive, sizes},
    nn::{Rope, RopeScaling},
};

/// Everything the model needs to know, with all defaults filled in.
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
    /// Heads of attention.
    pub attention: LayerSpec,
    /// The longest context: the model's own limit, or its sliding window if that is shorter.
    pub max_positions: usize,
    /// Epsilon of the norms.
    pub norm_epsilon: f64,
    /// Whether the QKV projection has a bias.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub output_bias: bool,
    /// Whether the MLP has biases.
    pub mlp_bias: bool,
    /// Whether the output projection is the token embedding.
    pub tied_head: bool,
    /// Channels of a head that rotate.
    pub rotary_dim: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Scaling of the rotary frequencies.
    pub rope_scaling: RopeScaling,
}

impl Config {
    /// What the model is, layer by layer.
    pub(super) fn spec(&self) -> ModelSpec {
        let Self { vocab_size, hidden_size, max_positions, n_layers, attention, .. } = *self;
        ModelSpec::uniform(vocab_size, hidden_size, max_positions, n_layers, attention)
            .with_rope(Rope::new(self.rotary_dim, self.rope_theta, &self.rope_scaling))
    }

    /// Checks a configuration that was made in code rather than read from a file.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] naming the field as `config.json` spells it.
    pub fn validate(&self) -> Result<()> {
        self.check(Path::new("llama config"))
    }

    /// Channels per head, of keys and of values.
    pub(super) fn head_dim(&self) -> usize {
        self.attention.head_dim.keys
    }

    /// Checks the values that the shapes of the tensors do not check; `path` is for the message.
    pub(super) fn check(&self, path: &Path) -> Result<()> {
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
            let rule = format!("must be head_dim {head_dim}: this family has one for both");
            return Err(Error::config(path, "head_dim of values", of_sides.values, rule));
        }
        if !self.rotary_dim.is_multiple_of(2) || self.rotary_dim > head_dim {
            let rule = format!("must be even and at most head_dim {head_dim}");
            return Err(Error::config(path, "rotary_dim", self.rotary_dim, rule));
        }
        positive(path, "rope_theta", self.rope_theta)?;
        positive(path, "rms_norm_eps", self.norm_epsilon)?;
        match &self.rope_scaling {
            RopeScaling::Default => Ok(()),
            &RopeScaling::Linear { factor } => positive(path, "rope_scaling.factor", factor),
            &RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_positions,
            } => {
                for (field, value) in [
                    ("factor", factor),
                    ("low_freq_factor", low_freq_factor),
                    ("high_freq_factor", high_freq_factor),
                    ("original_max_position_embeddings", original_max_positions),
                ] {
                    positive(path, &format!("rope_scaling.{field}"), value)?;
                }
                if high_freq_factor <= low_freq_factor {
                    let rule = format!("must be above low_freq_factor {low_freq_factor}");
                    let field = "rope_scaling.high_freq_factor";
                    return Err(Error::config(path, field, high_freq_factor, rule));
                }
                Ok(())
            }
            RopeScaling::LongRope {
                short_factors,
                long_factors,
                original_max_positions,
                attention_factor,
            } => {
                for (field, factors) in
                    [("short_factor", short_factors), ("long_factor", long_factors)]
                {
                    let field = format!("rope_scaling.{field}");
                    if factors.len() != self.rotary_dim / 2 {
                        let field = format!("length of {field}");
                        let rule =
                            format!("must be one per pair of rotary_dim {}", self.rotary_dim);
                        return Err(Error::config(path, field, factors.len(), rule));
                    }
                    factors.iter().try_for_each(|&x| positive(path, &field, x.into()))?;
                }
                let original = *original_max_positions as f64;
                positive(path, "original_max_position_embeddings", original)?;
                positive(path, "rope_scaling.attention_factor", *attention_factor)
            }
            RopeScaling::Divisors(divisors) => {
                if divisors.len() != self.rotary_dim / 2 {
                    let rule = format!("must be one per pair of rotary_dim {}", self.rotary_dim);
                    let field = "number of rope_scaling divisors";
                    return Err(Error::config(path, field, divisors.len(), rule));
                }
                divisors
                    .iter()
                    .try_for_each(|&divisor| positive(path, "rope_scaling divisor", divisor.into()))
            }
        }
    }
}

/// The families of the transformers library that [`Llama`](super::Llama) can be written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    Llama,
    Qwen2,
    /// Has fused projections, and is the only one of these in which only a part of a head may
    /// rotate.
    Phi3,
}

impl Config {
    /// The family that this configuration can be written as, if there is one.
    pub(super) fn dialect(&self) -> Option<Dialect> {
        let (n_heads, head_dim) = (self.attention.n_heads, self.head_dim());
        let partial = self.rotary_dim < head_dim;
        match (self.qkv_bias, self.output_bias, self.mlp_bias) {
            (false, false, false) if partial => {
                let known = matches!(
                    self.rope_scaling,
                    RopeScaling::Default | RopeScaling::LongRope { .. }
                );
                (known && n_heads * head_dim == self.hidden_size).then_some(Dialect::Phi3)
            }
            _ if partial => None,
            (qkv, output, _) if qkv == output => Some(Dialect::Llama),
            (true, false, false) => Some(Dialect::Qwen2),
            _ => None,
        }
    }

    /// The fields of `config.json` that [`from_json`](Self::from_json) reads, in the spelling that
    /// both old and new versions of the transformers library read; `path` is for the message.
    pub(super) fn to_json(&self, path: &Path) -> Result<Map<String, Value>> {
        let LayerSpec { n_heads, n_kv_heads, .. } = self.attention;
        let head_dim = self.head_dim();
        let unsupported = |what: &str| {
            let why = format!("{}: no Hugging Face family has it", path.display());
            Error::unsupported(format!("{what} in a saved model"), why)
        };
        let Some(dialect) = self.dialect() else {
            return Err(unsupported(&format!(
                "combination of qkv_bias {}, output_bias {}, mlp_bias {}, rotary_dim {} of \
                 head_dim {head_dim}",
                self.qkv_bias, self.output_bias, self.mlp_bias, self.rotary_dim,
            )));
        };
        let rope_scaling = match &self.rope_scaling {
            RopeScaling::Default => Value::Null,
            RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_positions,
            } => json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": whole(*original_max_positions),
            }),
            RopeScaling::LongRope {
                short_factors,
                long_factors,
                original_max_positions,
                attention_factor,
            } => json!({
                "rope_type": "longrope",
                "short_factor": short_factors,
                "long_factor": long_factors,
                "attention_factor": attention_factor,
                "factor": self.max_positions as f64 / *original_max_positions as f64,
                "original_max_position_embeddings": original_max_positions,
            }),
            // `longrope` with the same factors for short and long contexts and without scaling of
            // attention does nothing but divide the frequencies.
            RopeScaling::Divisors(divisors) => json!({
                "rope_type": "longrope",
                "short_factor": divisors,
                "long_factor": divisors,
                "attention_factor": 1.0,
                "factor": 1.0,
                "original_max_position_embeddings": self.max_positions,
            }),
        };
        let (model_type, architecture) = match dialect {
            Dialect::Llama => ("llama", "LlamaForCausalLM"),
            Dialect::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
            Dialect::Phi3 => ("phi3", "Phi3ForCausalLM"),
        };
        let mut fields = Map::new();
        let mut put = |key: &str, value: Value| fields.insert(key.into(), value);
        put("architectures", json!([architecture]));
        put("model_type", json!(model_type));
        put("vocab_size", json!(self.vocab_size));
        put("hidden_size", json!(self.hidden_size));
        put("intermediate_size", json!(self.intermediate_size));
        put("num_hidden_layers", json!(self.n_layers));
        put("num_attention_heads", json!(n_heads));
        put("num_key_value_heads", json!(n_kv_heads));
        put("max_position_embeddings", json!(self.max_positions));
        put("rms_norm_eps", json!(self.norm_epsilon));
        put("hidden_act", json!("silu"));
        put("tie_word_embeddings", json!(self.tied_head));
        put("rope_theta", json!(self.rope_theta));
        put("rope_scaling", rope_scaling);
        match dialect {
            Dialect::Llama => {
                put("head_dim", json!(head_dim));
                put("attention_bias", json!(self.qkv_bias));
                put("mlp_bias", json!(self.mlp_bias));
            }
            Dialect::Qwen2 => {
                put("head_dim", json!(head_dim));
                put("use_sliding_window", json!(false));
            }
            Dialect::Phi3 => {
                put("partial_rotary_factor", json!(self.rotary_factor()));
                if let RopeScaling::LongRope { original_max_positions, .. } = self.rope_scaling {
                    put("original_max_position_embeddings", json!(original_max_positions));
                }
            }
        }
        Ok(fields)
    }

    /// The share of a head that rotates, as a number that gives readers exactly `rotary_dim`: they
    /// multiply it by `head_dim` and round down, and their parser may get its last digit wrong.
    fn rotary_factor(&self) -> f64 {
        let head_dim = self.head_dim() as f64;
        let exact = self.rotary_dim as f64 / head_dim;
        let found = |factor: f64| (factor * head_dim) as usize == self.rotary_dim;
        let read = serde_json::from_str(&exact.to_string()).unwrap_or(exact);
        if found(exact) && found(read) { exact } else { (self.rotary_dim as f64 + 0.5) / head_dim }
    }
}

/// A number of positions is written without a fraction where it has none.
fn whole(x: f64) -> Value {
    if x.fract() == 0.0 && x < 9e15 { json!(x as u64) } else { json!(x) }
}
