//! GGUF metadata to the configurations that `config.json` also resolves to.

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

    /// Rows of the token embedding: files need not say how many tokens they know.
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

    pub(super) fn llama(
        &self,
        weights: &Weights,
        rope_freqs: Option<Vec<f32>>,
    ) -> Result<llama::Config> {
        let hidden_size = self.size("embedding_length")?;
        let n_heads = self.size("attention.head_count")?;
        let n_kv_heads = self.optional_size("attention.head_count_kv")?.unwrap_or(n_heads);
        let max_positions = self.size("context_length")?;
        let head_dim = match self.optional_size("attention.key_length")? {
            Some(head_dim) => head_dim,
            None if n_heads > 0 && hidden_size.is_multiple_of(n_heads) => hidden_size / n_heads,
            None => {
                let rule = format!("is not divisible by attention.head_count {n_heads}");
                let key = format!("{}.embedding_length", self.arch);
                return Err(Error::config(self.path, key, hidden_size, rule));
            }
        };
        let window = self.optional_size("attention.sliding_window")?.unwrap_or(0);
        if window > 0 && window < max_positions {
            let why = format!(
                "{} has {}.attention.sliding_window {window} below context_length \
                 {max_positions}, only full attention is computed",
                self.path.display(),
                self.arch,
            );
            return Err(Error::unsupported("sliding window attention", why));
        }
        let rotary_dim = self.optional_size("rope.dimension_count")?.unwrap_or(head_dim);
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
            rope_theta: self.float("rope.freq_base")?.unwrap_or(10_000.0),
            rope_scaling: self.rope_scaling(rotary_dim, weights, rope_freqs)?,
        };
        config.check(self.path)?;
        Ok(config)
    }

    fn rope_scaling(
        &self,
        rotary_dim: usize,
        weights: &Weights,
        rope_freqs: Option<Vec<f32>>,
    ) -> Result<RopeScaling> {
        let unsupported = |kind: &str, found: &str| {
            let why = format!(
                "{} has {found}; default, linear and llama3 (rope_freqs) are computed",
                self.path.display()
            );
            Error::unsupported(format!("rope type {kind}"), why)
        };
        if weights.contains("rope_factors_long.weight") {
            return Err(unsupported("longrope", "tensor rope_factors_long.weight"));
        }
        if let Some(divisors) = rope_freqs {
            if divisors.len() != rotary_dim / 2 {
                return Err(Error::Shape {
                    path: self.path.into(),
                    tensor: "rope_freqs.weight".into(),
                    actual: vec![divisors.len()],
                    expected: vec![rotary_dim / 2],
                });
            }
            if let Some(divisor) = divisors.iter().find(|divisor| **divisor <= 0.0) {
                let why = format!("holds {divisor}, divisors must be above 0");
                let tensor = "rope_freqs.weight".into();
                return Err(Error::Tensor { path: self.path.into(), tensor, why });
            }
            return Ok(RopeScaling::Divisors(divisors));
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
            (other, _) => Err(unsupported(other, &format!("rope.scaling.type {other}"))),
        }
    }
}
