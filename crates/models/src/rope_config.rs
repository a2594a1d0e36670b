//! Rope in configurations: `config.json`, and metadata and tensors of GGUF files. All families
//! share it.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    checkpoint::Weights,
    error::{Error, Result},
    fields::positive,
    gguf::Metadata,
    nn::{RopeScaling, yarn_gain},
};

/// The fields of `rope_parameters`, or of the older `rope_scaling`.
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
    pub(crate) attention_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: Option<bool>,
}

impl RopeFields {
    /// Returns the scaling. `original` is `original_max_position_embeddings` outside of
    /// `rope_scaling`, where Phi-3 has it.
    pub(crate) fn scaling(
        &self,
        path: &Path,
        max_positions: usize,
        original: Option<f64>,
    ) -> Result<RopeScaling> {
        let field = |name, value| needed(path, name, value);
        let kind = self.rope_type.as_deref().unwrap_or("default");
        if let Some(mscale) = self.mscale_all_dim.filter(|&mscale| mscale != 0.0)
            && !matches!(kind, "default" | "yarn")
        {
            let rule = "must be 0 with another rope_type than yarn";
            return Err(Error::config(path, "rope_scaling.mscale_all_dim", mscale, rule));
        }
        match kind {
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
            "yarn" => self.yarn(field("factor", self.factor)?, self.original(path, original)?),
            // The first Phi-3 models call it "su".
            "longrope" | "su" => self.longrope(path, max_positions, original),
            other => {
                let why = format!(
                    "{} has it; default, linear, llama3, longrope and yarn are supported",
                    path.display()
                );
                Err(Error::unsupported(format!("rope type {other}"), why))
            }
        }
    }

    /// Returns the [scaling](Self::scaling) of a head in which some pairs may have no frequency,
    /// which the rope type `proportional` describes.
    pub(crate) fn scaling_of_head(&self, path: &Path, max_positions: usize) -> Result<RopeScaling> {
        match self.rope_type.as_deref() {
            Some("proportional") => Ok(RopeScaling::Proportional {
                share: self.partial_rotary_factor.unwrap_or(1.0),
                factor: self.factor.unwrap_or(1.0),
            }),
            _ => self.scaling(path, max_positions, None),
        }
    }

    fn yarn(&self, factor: f64, original: f64) -> Result<RopeScaling> {
        let gain = |scale: f64| yarn_gain(factor, scale);
        let attention_factor =
            self.attention_factor.unwrap_or_else(|| match (self.mscale, self.mscale_all_dim) {
                (Some(a), Some(b)) if a != 0.0 && b != 0.0 => gain(a) / gain(b),
                _ => gain(1.0),
            });
        Ok(RopeScaling::Yarn {
            factor,
            beta_fast: self.beta_fast.unwrap_or(32.0),
            beta_slow: self.beta_slow.unwrap_or(1.0),
            original_max_positions: original as usize,
            attention_factor,
            truncate: self.truncate.unwrap_or(true),
            score_mscale: self.mscale_all_dim.unwrap_or(0.0),
        })
    }

    fn longrope(
        &self,
        path: &Path,
        max_positions: usize,
        original: Option<f64>,
    ) -> Result<RopeScaling> {
        let short_factors = needed(path, "short_factor", self.short_factor.clone())?;
        let long_factors = needed(path, "long_factor", self.long_factor.clone())?;
        let original = self.original(path, original)?;
        // As in the transformers library, which follows the paper (arXiv 2402.13753).
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

    fn original(&self, path: &Path, outside: Option<f64>) -> Result<f64> {
        let name = "original_max_position_embeddings";
        let original = needed(path, name, self.original_max_position_embeddings.or(outside))?;
        if !(1.0..=2_147_483_648.0).contains(&original) {
            let rule = "must be between 1 and 2147483648";
            return Err(Error::config(path, name, original, rule));
        }
        Ok(original)
    }
}

fn needed<T>(path: &Path, name: &str, value: Option<T>) -> Result<T> {
    let field = format!("rope_scaling.{name}");
    value.ok_or_else(|| Error::config(path, field, "missing", "the rope type needs it"))
}

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
            let (low, high) =
                (("low_freq_factor", low_freq_factor), ("high_freq_factor", high_freq_factor));
            let original = ("original_max_position_embeddings", original_max_positions);
            all_positive(path, &[("factor", factor), low, high, original])?;
            above(path, high, low)
        }
        &RopeScaling::Proportional { share, factor } => {
            if !(0.0..=1.0).contains(&share) {
                let field = "rope_scaling.partial_rotary_factor";
                return Err(Error::config(path, field, share, "must be from 0 to 1"));
            }
            positive(path, "rope_scaling.factor", factor)
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
                one_per_pair(path, format!("length of {field}"), factors, rotary_dim)?;
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
            score_mscale,
            ..
        } => {
            if !(score_mscale >= 0.0 && (scaling.score_gain() as f32).is_finite()) {
                let rule = "must be at least 0, and small enough for scores in f32";
                return Err(Error::config(path, "rope_scaling.mscale_all_dim", score_mscale, rule));
            }
            let (fast, slow) = (("beta_fast", beta_fast), ("beta_slow", beta_slow));
            let original = ("original_max_position_embeddings", original_max_positions as f64);
            let attention_factor = ("attention_factor", attention_factor);
            all_positive(path, &[("factor", factor), fast, slow, original, attention_factor])?;
            above(path, fast, slow)
        }
        RopeScaling::Divisors(divisors) => {
            one_per_pair(path, "number of rope_scaling divisors".into(), divisors, rotary_dim)?;
            divisors
                .iter()
                .try_for_each(|&divisor| positive(path, "rope_scaling divisor", divisor.into()))
        }
    }
}

fn all_positive(path: &Path, fields: &[(&str, f64)]) -> Result<()> {
    let check =
        |(field, value): &(&str, f64)| positive(path, &format!("rope_scaling.{field}"), *value);
    fields.iter().try_for_each(check)
}

fn above(path: &Path, (field, value): (&str, f64), (other, least): (&str, f64)) -> Result<()> {
    if value <= least {
        let rule = format!("must be above {other} {least}");
        return Err(Error::config(path, format!("rope_scaling.{field}"), value, rule));
    }
    Ok(())
}

fn one_per_pair(path: &Path, field: String, values: &[f32], rotary_dim: usize) -> Result<()> {
    if values.len() != rotary_dim / 2 {
        let rule = format!("must be one per pair of rotary_dim {rotary_dim}");
        return Err(Error::config(path, field, values.len(), rule));
    }
    Ok(())
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
            "{}: longrope: a cache for more than {original_max_positions} tokens uses the \
             frequencies of long contexts from its first token on",
            path.display()
        ));
    }
}

/// Returns `rope_scaling` of `config.json` for a model of `max_positions`.
pub(crate) fn to_json(scaling: &RopeScaling, max_positions: usize) -> Value {
    match scaling {
        RopeScaling::Default => Value::Null,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Proportional { share, factor } => json!({
            "rope_type": "proportional",
            "partial_rotary_factor": share,
            "factor": factor,
        }),
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
        // `longrope` with equal factors for short and long contexts and without scaling of
        // attention only divides the frequencies.
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
            score_mscale,
        } => {
            let mut fields = json!({
                "rope_type": "yarn",
                "factor": factor,
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
                "original_max_position_embeddings": original_max_positions,
                "attention_factor": attention_factor,
                "truncate": truncate,
            });
            if *score_mscale > 0.0 {
                fields["mscale_all_dim"] = json!(score_mscale);
                // Software that does not know `attention_factor` divides by this.
                if *attention_factor == 1.0 {
                    fields["mscale"] = json!(score_mscale);
                }
            }
            fields
        }
    }
}

fn whole(x: f64) -> Value {
    if x.fract() == 0.0 && x < 9e15 { json!(x as u64) } else { json!(x) }
}

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
