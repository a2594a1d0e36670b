//! Rope in the metadata and tensors of GGUF files.

use crate::{
    checkpoint::Weights,
    error::{Error, Result},
    fields::{positive, required},
    gguf::Metadata,
    nn::{RopeScaling, yarn_gain},
};

/// Returns the scaling in a GGUF file. Takes the rope tensors from `weights`.
pub(crate) fn from_gguf(
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
    scaling_of_metadata(metadata, context_length)
}

/// The factor of `mscale_all_dim` in GGUF files.
const LOG_MULTIPLIER: f64 = 0.1;

/// Returns the scaling that the metadata of a GGUF file names.
fn scaling_of_metadata(metadata: &Metadata<'_>, context_length: usize) -> Result<RopeScaling> {
    let factor = match metadata.float("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => metadata.float("rope.scale_linear")?,
    };
    let default = if factor.is_some() { "linear" } else { "none" };
    let kind = metadata.string("rope.scaling.type")?.unwrap_or(default);
    match (kind, factor) {
        ("none", _) | ("linear", None) => Ok(RopeScaling::Default),
        ("yarn", None) => {
            let field = metadata.key("rope.scaling.factor");
            required(metadata.path(), &field, None)
        }
        ("linear", Some(factor)) => {
            positive(metadata.path(), "rope.scaling.factor", factor)?;
            Ok(RopeScaling::Linear { factor })
        }
        ("yarn", Some(factor)) => {
            let original = metadata.optional_size("rope.scaling.original_context_length")?;
            let float = |key: &str, default: f64| -> Result<f64> {
                Ok(metadata.float(&format!("rope.scaling.{key}"))?.unwrap_or(default))
            };
            let multiplier = float("yarn_log_multiplier", 0.0)?;
            Ok(RopeScaling::Yarn {
                factor,
                beta_fast: float("yarn_beta_fast", 32.0)?,
                beta_slow: float("yarn_beta_slow", 1.0)?,
                original_max_positions: original.unwrap_or(context_length),
                // llama.cpp multiplies the optional factor of the file by this. With a multiplier,
                // scores grow instead of sines and cosines. Like llama.cpp, this assumes that
                // `mscale` is `mscale_all_dim`, because files have only the latter.
                attention_factor: float("attn_factor", 1.0)?
                    * if multiplier > 0.0 { 1.0 } else { yarn_gain(factor, 1.0) },
                truncate: true,
                // Files have f32, in which 0.1 is not exact.
                score_mscale: f64::from((multiplier / LOG_MULTIPLIER) as f32),
            })
        }
        (other, _) => {
            let why = format!(
                "{} has rope.scaling.type {other}; none, linear, yarn, llama3 (by rope_freqs) and \
                 longrope (by rope_factors) are supported",
                metadata.path().display()
            );
            Err(Error::unsupported(format!("rope type {other}"), why))
        }
    }
}
