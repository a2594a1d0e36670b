//! The rope as configurations describe it: in `config.json`, and in the metadata and tensors of
//! GGUF files. Families share it.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    Error, Result, checkpoint::Weights, fields::positive, gguf::Metadata, nn::RopeScaling,
};

/// `rope_parameters`, or the older `rope_scaling`.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct RopeFields {
    #[serde(alias = "type")]
    pub(crate) rope_type: Option<String>,
    pub(crate) rope_theta: Option<f64>,
    pub(crate) partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    short_factor: Option<Vec<f32>>,
    long_factor: Option<Vec<f32>>,
    attention_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: Option<bool>,
}

impl RopeFields {
    /// `original` is `original_max_position_embeddings` outside of `rope_scaling`, where Phi-3 has
    /// it.
    pub(crate) fn scaling(
        &self,
        path: &Path,
        max_positions: usize,
        original: Option<f64>,
    ) -> Result<RopeScaling> {
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
            "yarn" => {
                let factor = field("factor", self.factor)?;
                let original = self.original(path, original)?;
                Ok(RopeScaling::Yarn {
                    factor,
                    beta_fast: self.beta_fast.unwrap_or(32.0),
                    beta_slow: self.beta_slow.unwrap_or(1.0),
                    original_max_positions: original as usize,
                    attention_factor: self.attention_factor.unwrap_or_else(|| {
                        let gain = |scale: f64| yarn_gain(factor, scale);
                        match (self.mscale, self.mscale_all_dim) {
                            (Some(a), Some(b)) if a != 0.0 && b != 0.0 => gain(a) / gain(b),
                            _ => gain(1.0),
                        }
                    }),
                    truncate: self.truncate.unwrap_or(true),
                })
            }
            // The first Phi-3 models call it "su".
            "longrope" | "su" => {
                let factors = |name: &str, factors: &Option<Vec<f32>>| {
                    let field = format!("rope_scaling.{name}");
                    let rule = "the rope type needs it";
                    let missing = || Error::config(path, field, "missing", rule);
                    factors.clone().ok_or_else(missing)
                };
                let short_factors = factors("short_factor", &self.short_factor)?;
                let long_factors = factors("long_factor", &self.long_factor)?;
                let original = self.original(path, original)?;
                // As the transformers library has it, after the paper (arXiv 2402.13753).
                let factor = self.factor.unwrap_or(max_positions as f64 / original);
                let attention_factor = match self.attention_factor {
                    Some(factor) => factor,
                    None if factor <= 1.0 => 1.0,
                    None => (1.0 + factor.ln() / original.ln()).sqrt(),
                };
                if short_factors == long_factors && attention_factor == 1.0 {
                    return Ok(RopeScaling::Divisors(long_factors));
                }
                Ok(RopeScaling::LongRope {
                    short_factors,
                    long_factors,
                    original_max_positions: original as usize,
                    attention_factor,
                })
            }
            other => {
                let why = format!(
                    "{} asks for it; default, linear, llama3, longrope and yarn are computed",
                    path.display()
                );
                Err(Error::unsupported(format!("rope type {other}"), why))
            }
        }
    }

    fn original(&self, path: &Path, outside: Option<f64>) -> Result<f64> {
        let name = "original_max_position_embeddings";
        let Some(original) = self.original_max_position_embeddings.or(outside) else {
            let field = format!("rope_scaling.{name}");
            return Err(Error::config(path, field, "missing", "the rope type needs it"));
        };
        if !(1.0..=2_147_483_648.0).contains(&original) {
            let rule = "must be between 1 and 2147483648";
            return Err(Error::config(path, name, original, rule));
        }
        Ok(original)
    }
}

/// What YaRN multiplies sines and cosines with, by its paper (<https://arxiv.org/abs/2309.00071>).
fn yarn_gain(factor: f64, scale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 }
}

/// Checks the numbers of a scaling of `rotary_dim` channels.
pub(crate) fn check(path: &Path, scaling: &RopeScaling, rotary_dim: usize) -> Result<()> {
    match scaling {
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
            for (field, factors) in [("short_factor", short_factors), ("long_factor", long_factors)]
            {
                let field = format!("rope_scaling.{field}");
                if factors.len() != rotary_dim / 2 {
                    let field = format!("length of {field}");
                    let rule = format!("must be one per pair of rotary_dim {}", rotary_dim);
                    return Err(Error::config(path, field, factors.len(), rule));
                }
                factors.iter().try_for_each(|&x| positive(path, &field, x.into()))?;
            }
            let original = *original_max_positions as f64;
            positive(path, "original_max_position_embeddings", original)?;
            positive(path, "rope_scaling.attention_factor", *attention_factor)
        }
        &RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_max_positions,
            attention_factor,
            ..
        } => {
            for (field, value) in [
                ("factor", factor),
                ("beta_fast", beta_fast),
                ("beta_slow", beta_slow),
                ("original_max_position_embeddings", original_max_positions as f64),
                ("attention_factor", attention_factor),
            ] {
                positive(path, &format!("rope_scaling.{field}"), value)?;
            }
            if beta_fast <= beta_slow {
                let rule = format!("must be above beta_slow {beta_slow}");
                return Err(Error::config(path, "rope_scaling.beta_fast", beta_fast, rule));
            }
            Ok(())
        }
        RopeScaling::Divisors(divisors) => {
            if divisors.len() != rotary_dim / 2 {
                let rule = format!("must be one per pair of rotary_dim {}", rotary_dim);
                let field = "number of rope_scaling divisors";
                return Err(Error::config(path, field, divisors.len(), rule));
            }
            divisors
                .iter()
                .try_for_each(|&divisor| positive(path, "rope_scaling divisor", divisor.into()))
        }
    }
}

/// Adds a note if the rope frequencies of `scaling` depend on the capacity of the cache.
pub(crate) fn note_longrope(
    path: &Path,
    scaling: &RopeScaling,
    max_positions: usize,
    notes: &mut Vec<String>,
) {
    if let RopeScaling::LongRope { original_max_positions, .. } = *scaling
        && original_max_positions < max_positions
    {
        notes.push(format!(
            "{}: longrope: a cache with room for more than {original_max_positions} tokens takes the \
             frequencies of long contexts from its first token on",
            path.display()
        ));
    }
}

/// `rope_scaling` of `config.json`, for a model of so many positions.
pub(crate) fn to_json(scaling: &RopeScaling, max_positions: usize) -> Value {
    match scaling {
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
            "factor": max_positions as f64 / *original_max_positions as f64,
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
            "original_max_position_embeddings": max_positions,
        }),
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_max_positions,
            attention_factor,
            truncate,
        } => json!({
            "rope_type": "yarn",
            "factor": factor,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "original_max_position_embeddings": original_max_positions,
            "attention_factor": attention_factor,
            "truncate": truncate,
        }),
    }
}

/// A number of positions is written without a fraction where it has none.
fn whole(x: f64) -> Value {
    if x.fract() == 0.0 && x < 9e15 { json!(x as u64) } else { json!(x) }
}

/// The scaling in a GGUF file. Takes the tensors of the rope out of `weights`.
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
        ("yarn", Some(factor)) => {
            let original = metadata.optional_size("rope.scaling.original_context_length")?;
            let float = |key: &str, default: f64| -> Result<f64> {
                Ok(metadata.float(&format!("rope.scaling.{key}"))?.unwrap_or(default))
            };
            Ok(RopeScaling::Yarn {
                factor,
                beta_fast: float("yarn_beta_fast", 32.0)?,
                beta_slow: float("yarn_beta_slow", 1.0)?,
                original_max_positions: original.unwrap_or(context_length),
                // llama.cpp multiplies the factor of the file, if there is one, by this.
                attention_factor: float("attn_factor", 1.0)? * yarn_gain(factor, 1.0),
                truncate: true,
            })
        }
        (other, _) => {
            let why = format!(
                "{} has rope.scaling.type {other}; none, linear, yarn, llama3 (by rope_freqs) and \
                 longrope (by rope_factors) are computed",
                metadata.path().display()
            );
            Err(Error::unsupported(format!("rope type {other}"), why))
        }
    }
}
