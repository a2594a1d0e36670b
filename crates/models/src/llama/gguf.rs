//! From the metadata of a GGUF file to [`Config`].

use super::{
    Config,
    resolve::{cap_at_window, note_longrope},
};
use crate::{
    Error, LayerSpec, Result, checkpoint::Weights, fields, fields::positive, gguf::Metadata,
    nn::RopeScaling,
};

impl Config {
    /// Resolves the metadata of a GGUF file. Takes the tensors of the rotary encoding out of
    /// `weights`, and adds to its notes what a user should know.
    pub(super) fn from_gguf(metadata: &Metadata<'_>, weights: &mut Weights) -> Result<Self> {
        let path = metadata.path();
        let hidden_size = metadata.size("embedding_length")?;
        let n_heads = metadata.size("attention.head_count")?;
        let n_kv_heads = metadata.optional_size("attention.head_count_kv")?.unwrap_or(n_heads);
        let context_length = metadata.size("context_length")?;
        let head_dim = match metadata.optional_size("attention.key_length")? {
            Some(head_dim) => head_dim,
            None => {
                let width = (&*metadata.key("embedding_length"), hidden_size);
                fields::head_dim(path, width, ("attention.head_count", n_heads))?
            }
        };
        let mut max_positions = context_length;
        // llama.cpp writes 0 for no sliding window.
        let window = metadata.optional_size("attention.sliding_window")?.filter(|&n| n > 0);
        if let Some(window) = window {
            let fields = (metadata.key("attention.sliding_window"), metadata.key("context_length"));
            cap_at_window(path, &fields, window, &mut max_positions, weights.notes());
        }
        let rotary_dim = metadata.optional_size("rope.dimension_count")?.unwrap_or(head_dim);
        let rope_theta = metadata.float("rope.freq_base")?.unwrap_or(10_000.0);
        let epsilon = metadata.float("attention.layer_norm_rms_epsilon")?;
        let config = Self {
            vocab_size: weights.rows("embed_tokens.weight")?,
            hidden_size,
            intermediate_size: metadata.size("feed_forward_length")?,
            n_layers: metadata.size("block_count")?,
            attention: LayerSpec::new(n_heads, n_kv_heads, head_dim),
            max_positions,
            norm_epsilon: epsilon.unwrap_or(1e-5),
            qkv_bias: weights.contains("layers.0.self_attn.q_proj.bias")
                || weights.contains("layers.0.self_attn.qkv_proj.bias"),
            output_bias: weights.contains("layers.0.self_attn.o_proj.bias"),
            mlp_bias: weights.contains("layers.0.mlp.down_proj.bias"),
            tied_head: !weights.contains("lm_head.weight"),
            rotary_dim,
            rope_theta,
            rope_scaling: rope_scaling(metadata, rotary_dim, rope_theta, context_length, weights)?,
        };
        config.check(path)?;
        note_longrope(path, &config, weights.notes());
        Ok(config)
    }

    /// Says that queries and keys are stored for interleaved rotation, as in GGUF files of
    /// architecture `llama`; this crate rotates halves.
    pub(super) fn interleaved(&self, weights: &mut Weights) {
        let LayerSpec { n_heads, n_kv_heads, .. } = self.attention;
        let head_dim = self.head_dim();
        for i in 0..self.n_layers {
            for (part, heads) in [("q_proj", n_heads), ("k_proj", n_kv_heads)] {
                for kind in ["weight", "bias"] {
                    let name = format!("layers.{i}.self_attn.{part}.{kind}");
                    weights.interleaved(&name, heads * head_dim, head_dim);
                }
            }
        }
    }
}

fn rope_scaling(
    metadata: &Metadata<'_>,
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
            return Err(Error::Tensor { path: metadata.path().into(), tensor: name.into(), why });
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
            let original = metadata.optional_size("rope.scaling.original_context_length")?;
            return Ok(RopeScaling::LongRope {
                short_factors,
                long_factors,
                original_max_positions: original.unwrap_or(context_length),
                attention_factor: metadata.float("rope.scaling.attn_factor")?.unwrap_or(1.0),
            });
        }
        (None, _) => {
            return Err(Error::MissingTensor { path: metadata.path().into(), tensor: short });
        }
        (_, None) => {
            return Err(Error::MissingTensor { path: metadata.path().into(), tensor: long });
        }
    }
    let factor = match metadata.float("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => metadata.float("rope.scale_linear")?,
    };
    let default = if factor.is_some() { "linear" } else { "none" };
    let kind = metadata.string("rope.scaling.type").unwrap_or(default);
    match (kind, factor) {
        ("none", _) | ("linear", None) => Ok(RopeScaling::Default),
        ("linear", Some(factor)) => {
            positive(metadata.path(), "rope.scaling.factor", factor)?;
            Ok(RopeScaling::Linear { factor })
        }
        (other, _) => {
            let why = format!(
                "{} has rope.scaling.type {other}; none, linear, llama3 (by rope_freqs) and \
                 longrope (by rope_factors) are computed",
                metadata.path().display()
            );
            Err(Error::unsupported(format!("rope type {other}"), why))
        }
    }
}
