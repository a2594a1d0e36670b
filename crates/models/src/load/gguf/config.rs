//! From GGUF metadata to the configurations that are also read from `config.json`.

use std::path::Path;

use super::{Value, header::Header};
use crate::{
    Error, Result, gpt2, llama,
    load::Weights,
    nn::{AttentionShape, RopeScaling},
};

/// Metadata of one architecture, whose keys start with its name.
pub(super) struct Metadata<'a> {
    pub(super) header: &'a Header,
    pub(super) arch: &'a str,
    pub(super) path: &'a Path,
}

impl Metadata<'_> {
    fn get(&self, key: &str) -> Option<(String, &Value)> {
        let key = format!("{}.{key}", self.arch);
        self.header.metadata.get(&key).map(|value| (key, value))
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        match self.get(key) {
            None => Ok(None),
            Some((_, &Value::Unsigned(n))) if n <= 1 << 40 => Ok(Some(n as usize)),
            Some((_, &Value::Signed(n))) if (0..=1 << 40).contains(&n) => Ok(Some(n as usize)),
            Some((key, other)) => {
                let rule = "must be an unsigned integer";
                Err(Error::config(self.path, key, format!("{other:?}"), rule))
            }
        }
    }

    fn size(&self, key: &str) -> Result<usize> {
        let value = self.optional_size(key)?;
        llama::required(self.path, &format!("{}.{key}", self.arch), value)
    }

    fn float(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some((_, &Value::Float(x))) => Ok(Some(x)),
            Some((key, other)) => {
                Err(Error::config(self.path, key, format!("{other:?}"), "must be a float"))
            }
        }
    }

    /// The size of the vocabulary, which is the number of rows of the token embedding: files need
    /// not state it.
    fn vocab_size(&self, weights: &Weights, name: &str) -> Result<usize> {
        weights.shape(name).and_then(|shape| shape.first().copied()).ok_or_else(|| {
            Error::MissingTensor { path: self.path.into(), tensor: "token_embd.weight".into() }
        })
    }

    pub(super) fn gpt2(&self, weights: &Weights) -> Result<gpt2::Config> {
        let config = gpt2::Config {
            vocab_size: self.vocab_size(weights, "wte.weight")?,
            hidden_size: self.size("embedding_length")?,
            intermediate_size: self.size("feed_forward_length")?,
            n_layers: self.size("block_count")?,
            n_heads: self.size("attention.head_count")?,
            max_positions: self.size("context_length")?,
            norm_epsilon: self.float("attention.layer_norm_epsilon")?.unwrap_or(1e-5),
            activation: gpt2::Activation::GeluTanh,
            tied_head: !weights.contains("lm_head.weight"),
        };
        config.check(self.path)?;
        Ok(config)
    }

    /// The configuration of a model of the Llama family. Takes the tensors of the rotary encoding
    /// out of `weights`, and adds to `notes` what a user should know.
    pub(super) fn llama(
        &self,
        weights: &mut Weights,
        notes: &mut Vec<String>,
    ) -> Result<llama::Config> {
        let hidden_size = self.size("embedding_length")?;
        let n_heads = self.size("attention.head_count")?;
        let n_kv_heads = self.optional_size("attention.head_count_kv")?.unwrap_or(n_heads);
        let context_length = self.size("context_length")?;
        let head_dim = match self.optional_size("attention.key_length")? {
            Some(head_dim) => head_dim,
            None if n_heads > 0 && hidden_size.is_multiple_of(n_heads) => hidden_size / n_heads,
            None => {
                let rule = format!("is not divisible by attention.head_count {n_heads}");
                let key = format!("{}.embedding_length", self.arch);
                return Err(Error::config(self.path, key, hidden_size, rule));
            }
        };
        let mut max_positions = context_length;
        // llama.cpp writes 0 for no sliding window.
        if let Some(window) = self.optional_size("attention.sliding_window")?.filter(|&n| n > 0) {
            let fields = (
                format!("{}.attention.sliding_window", self.arch),
                format!("{}.context_length", self.arch),
            );
            llama::cap_at_window(self.path, &fields, window, &mut max_positions, notes);
        }
        let rotary_dim = self.optional_size("rope.dimension_count")?.unwrap_or(head_dim);
        let rope_theta = self.float("rope.freq_base")?.unwrap_or(10_000.0);
        let config = llama::Config {
            vocab_size: self.vocab_size(weights, "embed_tokens.weight")?,
            hidden_size,
            intermediate_size: self.size("feed_forward_length")?,
            n_layers: self.size("block_count")?,
            attention: AttentionShape { n_heads, n_kv_heads, head_dim },
            max_positions,
            norm_epsilon: self.float("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-5),
            qkv_bias: weights.contains("layers.0.self_attn.q_proj.bias")
                || weights.contains("layers.0.self_attn.qkv_proj.bias"),
            output_bias: weights.contains("layers.0.self_attn.o_proj.bias"),
            mlp_bias: weights.contains("layers.0.mlp.down_proj.bias"),
            tied_head: !weights.contains("lm_head.weight"),
            rotary_dim,
            rope_theta,
            rope_scaling: self.rope_scaling(rotary_dim, rope_theta, context_length, weights)?,
        };
        config.check(self.path)?;
        llama::note_longrope(self.path, &config, notes);
        Ok(config)
    }

    fn rope_scaling(
        &self,
        rotary_dim: usize,
        rope_theta: f64,
        context_length: usize,
        weights: &mut Weights,
    ) -> Result<RopeScaling> {
        let mut factors = |name: &str| -> Result<Option<Vec<f32>>> {
            if !weights.contains(name) {
                return Ok(None);
            }
            let factors = weights.floats(name, rotary_dim / 2)?;
            if let Some(factor) = factors.iter().find(|factor| **factor <= 0.0) {
                let why = format!("holds {factor}, divisors must be above 0");
                return Err(Error::Tensor { path: self.path.into(), tensor: name.into(), why });
            }
            Ok(Some(factors))
        };
        if let Some(divisors) = factors("rope_freqs.weight")? {
            return Ok(RopeScaling::of_divisors(divisors, rope_theta));
        }
        let [short, long] = ["short", "long"].map(|kind| format!("rope_factors_{kind}.weight"));
        match (factors(&short)?, factors(&long)?) {
            (None, None) => {}
            (Some(short_factors), Some(long_factors)) => {
                let original = self.optional_size("rope.scaling.original_context_length")?;
                return Ok(RopeScaling::LongRope {
                    short_factors,
                    long_factors,
                    original_max_positions: original.unwrap_or(context_length),
                    attention_factor: self.float("rope.scaling.attn_factor")?.unwrap_or(1.0),
                });
            }
            (None, _) => {
                return Err(Error::MissingTensor { path: self.path.into(), tensor: short });
            }
            (_, None) => {
                return Err(Error::MissingTensor { path: self.path.into(), tensor: long });
            }
        }
        let factor = match self.float("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.float("rope.scale_linear")?,
        };
        let kind = match self.get("rope.scaling.type") {
            Some((_, Value::String(kind))) => kind.as_str(),
            _ if factor.is_some() => "linear",
            _ => "none",
        };
        match (kind, factor) {
            ("none", _) | ("linear", None) => Ok(RopeScaling::Default),
            ("linear", Some(factor)) => {
                llama::positive(self.path, "rope.scaling.factor", factor)?;
                Ok(RopeScaling::Linear { factor })
            }
            (other, _) => {
                let why = format!(
                    "{} has rope.scaling.type {other}; none, linear, llama3 (by rope_freqs) and \
                     longrope (by rope_factors) are computed",
                    self.path.display()
                );
                Err(Error::unsupported(format!("rope type {other}"), why))
            }
        }
    }
}
