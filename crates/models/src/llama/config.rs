//! `config.json` of the Llama family, resolved once.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    Error, Result,
    nn::{AttentionShape, Rope, RopeScaling},
};

/// Everything the model needs to know, with nothing left to default.
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
    /// Heads.
    pub attention: AttentionShape,
    /// The longest context.
    pub max_positions: usize,
    /// Epsilon of the norms.
    pub norm_epsilon: f64,
    /// Whether the QKV projection has a bias.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub output_bias: bool,
    /// Whether the MLP has biases.
    pub mlp_bias: bool,
    /// Whether the head is the embedding.
    pub tied_head: bool,
    /// Channels of a head that rotate.
    pub rotary_dim: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Their scaling.
    pub rope_scaling: RopeScaling,
}

impl Config {
    /// The rotary encoding.
    pub(super) fn rope(&self) -> Rope {
        Rope::new(self.rotary_dim, self.rope_theta, &self.rope_scaling)
    }

    /// Checks a configuration that no file was resolved to.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] naming the field as `config.json` spells it.
    pub fn validate(&self) -> Result<()> {
        self.check(Path::new("llama config"))
    }

    /// Checks what the tensors' shapes cannot; `path` is for the message.
    pub(crate) fn check(&self, path: &Path) -> Result<()> {
        let AttentionShape { n_heads, n_kv_heads, head_dim } = self.attention;
        for (field, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.n_layers),
            ("num_attention_heads", n_heads),
            ("num_key_value_heads", n_kv_heads),
            ("head_dim", head_dim),
            ("max_position_embeddings", self.max_positions),
            ("rotary_dim", self.rotary_dim),
        ] {
            if value == 0 || value > 1 << 31 {
                return Err(Error::config(path, field, value, "must be between 1 and 2147483648"));
            }
        }
        if !n_heads.is_multiple_of(n_kv_heads) {
            let rule = format!("does not divide num_attention_heads {n_heads}");
            return Err(Error::config(path, "num_key_value_heads", n_kv_heads, rule));
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

    /// Resolves `config.json`.
    ///
    /// # Errors
    ///
    /// A missing or contradictory field, or a feature this crate does not compute.
    pub fn from_json(text: &str, path: &Path) -> Result<Self> {
        let raw: Raw = serde_json::from_str(text).map_err(|error| Error::Malformed {
            path: path.into(),
            format: "config.json",
            why: error.to_string(),
        })?;
        raw.resolve(path)
    }
}

/// The families of the transformers library that [`Llama`](super::Llama) can be written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    Llama,
    Qwen2,
    /// Fused projections, and the only one of these where a part of a head rotates.
    Phi3,
}

impl Config {
    /// The family whose checkpoints compute this, if there is one.
    pub(super) fn family(&self) -> Option<Family> {
        let AttentionShape { n_heads, head_dim, .. } = self.attention;
        let partial = self.rotary_dim < head_dim;
        match (self.qkv_bias, self.output_bias, self.mlp_bias) {
            (false, false, false) if partial => {
                let default = self.rope_scaling == RopeScaling::Default;
                (default && n_heads * head_dim == self.hidden_size).then_some(Family::Phi3)
            }
            _ if partial => None,
            (qkv, output, _) if qkv == output => Some(Family::Llama),
            (true, false, false) => Some(Family::Qwen2),
            _ => None,
        }
    }

    /// The fields of `config.json` that [`from_json`](Self::from_json) reads, in the spelling that
    /// old and new versions of the transformers library know; `path` is for the message.
    pub(crate) fn to_json(&self, path: &Path) -> Result<Map<String, Value>> {
        let AttentionShape { n_heads, n_kv_heads, head_dim } = self.attention;
        let unsupported = |what: &str| {
            let why = format!("{}: no Hugging Face family has it", path.display());
            Error::unsupported(format!("{what} in a saved model"), why)
        };
        let Some(family) = self.family() else {
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
            RopeScaling::Divisors(_) => {
                return Err(unsupported("rope_scaling by the divisors of a GGUF file"));
            }
        };
        let (model_type, architecture) = match family {
            Family::Llama => ("llama", "LlamaForCausalLM"),
            Family::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
            Family::Phi3 => ("phi3", "Phi3ForCausalLM"),
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
        match family {
            Family::Llama => {
                put("head_dim", json!(head_dim));
                put("attention_bias", json!(self.qkv_bias));
                put("mlp_bias", json!(self.mlp_bias));
            }
            Family::Qwen2 => {
                put("head_dim", json!(head_dim));
                put("use_sliding_window", json!(false));
            }
            Family::Phi3 => {
                put("partial_rotary_factor", json!(self.rotary_factor()));
            }
        }
        Ok(fields)
    }

    /// The share of a head that rotates, such that readers, who round down and may read the last
    /// digit wrong, find `rotary_dim`.
    fn rotary_factor(&self) -> f64 {
        let head_dim = self.attention.head_dim as f64;
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

/// Fields as the transformers library writes them, old and new.
#[derive(Deserialize)]
struct Raw {
    model_type: String,
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f64>,
    hidden_act: Option<String>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    tie_word_embeddings: Option<bool>,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    layer_types: Option<Vec<String>>,
    partial_rotary_factor: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    rope_parameters: Option<RawRope>,
}

/// `rope_parameters`, or the older `rope_scaling`.
#[derive(Deserialize)]
struct RawRope {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

impl Raw {
    fn resolve(self, path: &Path) -> Result<Config> {
        let family = self.model_type.as_str();
        let hidden_size = required(path, "hidden_size", self.hidden_size)?;
        let n_heads = required(path, "num_attention_heads", self.num_attention_heads)?;
        let n_kv_heads = self.num_key_value_heads.unwrap_or(n_heads);
        let max_positions =
            required(path, "max_position_embeddings", self.max_position_embeddings)?;
        let head_dim = match self.head_dim {
            Some(head_dim) => head_dim,
            None if n_heads > 0 && hidden_size.is_multiple_of(n_heads) => hidden_size / n_heads,
            None => {
                let rule = format!("is not divisible by num_attention_heads {n_heads}");
                return Err(Error::config(path, "hidden_size", hidden_size, rule));
            }
        };
        self.check_supported(path, max_positions)?;

        let new_rope = self.rope_parameters.as_ref();
        let rope = new_rope.or(self.rope_scaling.as_ref());
        let rope_theta =
            new_rope.and_then(|rope| rope.rope_theta).or(self.rope_theta).unwrap_or(10_000.0);
        let partial = new_rope
            .and_then(|rope| rope.partial_rotary_factor)
            .or(self.partial_rotary_factor)
            .unwrap_or(1.0);
        if !(partial > 0.0 && partial <= 1.0) {
            let rule = "must be above 0 and at most 1";
            return Err(Error::config(path, "partial_rotary_factor", partial, rule));
        }
        let bias = self.attention_bias.unwrap_or(false);
        let config = Config {
            vocab_size: required(path, "vocab_size", self.vocab_size)?,
            hidden_size,
            intermediate_size: required(path, "intermediate_size", self.intermediate_size)?,
            n_layers: required(path, "num_hidden_layers", self.num_hidden_layers)?,
            attention: AttentionShape { n_heads, n_kv_heads, head_dim },
            max_positions,
            norm_epsilon: self.rms_norm_eps.unwrap_or(1e-6),
            qkv_bias: bias || family == "qwen2",
            output_bias: bias,
            mlp_bias: self.mlp_bias.unwrap_or(false),
            tied_head: self.tie_word_embeddings.unwrap_or(false),
            rotary_dim: (head_dim as f64 * partial) as usize,
            rope_theta,
            rope_scaling: match rope {
                Some(rope) => rope.scaling(path)?,
                None => RopeScaling::Default,
            },
        };
        config.check(path)?;
        Ok(config)
    }

    fn check_supported(&self, path: &Path, max_positions: usize) -> Result<()> {
        let act = self.hidden_act.as_deref().unwrap_or("silu");
        if act != "silu" && act != "swish" {
            let why = format!("{} asks for hidden_act {act}, silu is computed", path.display());
            return Err(Error::unsupported("activation", why));
        }
        let sliding_layers = self
            .layer_types
            .as_ref()
            .is_some_and(|types| types.iter().any(|kind| kind != "full_attention"));
        // Qwen2 carries a sliding_window that `use_sliding_window` switches off.
        let enabled = self.use_sliding_window.unwrap_or(self.model_type != "qwen2");
        let window = self.sliding_window.filter(|&window| enabled && window < max_positions);
        if sliding_layers || window.is_some() {
            let window = window.map_or("in layer_types".into(), |window| window.to_string());
            let why = format!(
                "{} has sliding_window {window} below max_position_embeddings {max_positions}, \
                 only full attention is computed",
                path.display()
            );
            return Err(Error::unsupported("sliding window attention", why));
        }
        Ok(())
    }
}

impl RawRope {
    fn scaling(&self, path: &Path) -> Result<RopeScaling> {
        let field = |name: &str, value: Option<f64>| {
            let field = format!("rope_scaling.{name}");
            value.ok_or_else(|| Error::config(path, field, "missing", "the rope type needs it"))
        };
        match self.rope_type.as_deref().unwrap_or("default") {
            "default" => Ok(RopeScaling::Default),
            "linear" => Ok(RopeScaling::Linear { factor: field("factor", self.factor)? }),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: field("factor", self.factor)?,
                low_freq_factor: field("low_freq_factor", self.low_freq_factor)?,
                high_freq_factor: field("high_freq_factor", self.high_freq_factor)?,
                original_max_positions: field(
                    "original_max_position_embeddings",
                    self.original_max_position_embeddings,
                )?,
            }),
            other => Err(Error::unsupported(
                format!("rope type {other}"),
                format!("{} asks for it; default, linear and llama3 are computed", path.display()),
            )),
        }
    }
}

pub(crate) fn required<T>(path: &Path, field: &str, value: Option<T>) -> Result<T> {
    value.ok_or_else(|| Error::config(path, field, "missing", "the model needs it"))
}

pub(crate) fn positive(path: &Path, field: &str, value: f64) -> Result<()> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(Error::config(path, field, value, "must be finite and above 0"))
}
