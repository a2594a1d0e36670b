//! Rope in configurations: `config.json`, and metadata and tensors of GGUF files. All families
//! share it.

mod gguf;

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

pub(crate) use self::gguf::from_gguf;
use crate::{
    error::{Error, Result},
    family::{ConfigJson, JsonFields},
    fields::{at_most, positive},
    nn::{RopeScaling, yarn_gain},
    spec::ModelSpec,
};

const ORIGINAL: &str = "original_max_position_embeddings";

/// The fields of `rope_parameters`, or of the older `rope_scaling`.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct RopeFields {
    rope_type: Option<String>,
    /// The older name of the field above. Some files have both.
    #[serde(rename = "type")]
    old_type: Option<String>,
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

/// Refuses a `config.json` whose `rope_scaling` contradicts its `rope_parameters`: versions of
/// transformers differ in the one that they use.
pub(crate) fn check_one_rope(json: &ConfigJson<'_>) -> Result<()> {
    let text = json.text_fields()?;
    let fields: JsonFields = ConfigJson { text: &text, ..*json }.parse()?;
    let object = |name: &str| fields.get(name).and_then(Value::as_object);
    let (Some(new), Some(old)) = (object("rope_parameters"), object("rope_scaling")) else {
        return Ok(());
    };
    let kind = |rope: &JsonFields| {
        let found = ["rope_type", "type"].map(|name| rope.get(name));
        let found = found.into_iter().flatten().find(|kind| !kind.is_null());
        found.cloned().unwrap_or(Value::Null)
    };
    let beside = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];
    let names = new.keys().filter(|name| !beside.contains(&name.as_str())).chain(old.keys());
    let names = ["rope_type"].into_iter().chain(names.map(String::as_str));
    let pair = |name: &str| match name {
        "rope_type" | "type" => [kind(old), kind(new)],
        _ => [old, new].map(|rope| rope.get(name).cloned().unwrap_or(Value::Null)),
    };
    let differs = |[a, b]: &[Value; 2]| match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a != b,
        _ => a != b,
    };
    let mut pairs = names.map(|name| (name, pair(name)));
    match pairs.find(|(_, pair)| differs(pair)) {
        None => Ok(()),
        Some((name, [old, new])) => {
            let rule = format!("rope_parameters.{name} is {new}; keep one of the two objects");
            Err(Error::config(json.path, format!("rope_scaling.{name}"), old, rule))
        }
    }
}

/// Checks that all angles and factors of a model's ropes are finite in f32.
pub(crate) fn check_angles(path: &Path, spec: &ModelSpec) -> Result<()> {
    if spec.ropes.iter().all(|rope| rope.is_finite(spec.max_positions)) {
        return Ok(());
    }
    let rule = "must be finite in f32 at every position; correct rope_theta or the rope scaling";
    Err(Error::config(path, "rope angles", "not finite", rule))
}

impl RopeFields {
    /// Returns the rope type, if the file names one.
    pub(crate) fn kind(&self) -> Option<&str> {
        self.rope_type.as_deref().or(self.old_type.as_deref())
    }

    /// Returns the name of the first field that only a rope type other than `default` has.
    fn scaled_by(&self) -> Option<&'static str> {
        let given = [
            ("factor", self.factor.is_some()),
            ("low_freq_factor", self.low_freq_factor.is_some()),
            ("high_freq_factor", self.high_freq_factor.is_some()),
            ("short_factor", self.short_factor.is_some()),
            ("long_factor", self.long_factor.is_some()),
            ("attention_factor", self.attention_factor.is_some()),
            ("beta_fast", self.beta_fast.is_some()),
            ("beta_slow", self.beta_slow.is_some()),
            ("mscale", self.mscale.is_some()),
            ("mscale_all_dim", self.mscale_all_dim.is_some()),
            (ORIGINAL, self.original_max_position_embeddings.is_some()),
        ];
        given.into_iter().find(|(_, is_given)| *is_given).map(|(name, _)| name)
    }

    /// Returns the scaling. `original` is `original_max_position_embeddings` outside of
    /// `rope_scaling`, where Phi-3 has it.
    pub(crate) fn scaling(
        &self,
        path: &Path,
        max_positions: usize,
        original: Option<f64>,
    ) -> Result<RopeScaling> {
        let field = |name, value| needed(path, name, value);
        let kind = self.kind().unwrap_or("default");
        if self.kind().is_none()
            && let Some(name) = self.scaled_by()
        {
            let rule = format!("must name the rope type that {name} belongs to, such as yarn");
            return Err(Error::config(path, "rope_scaling.rope_type", "missing", rule));
        }
        if let Some(mscale) = self.mscale_all_dim.filter(|&mscale| mscale != 0.0)
            && matches!(kind, "linear" | "llama3" | "longrope" | "su")
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
                original_max_positions: field(ORIGINAL, self.original_max_position_embeddings)?,
            }),
            "yarn" => {
                if let Some(mscale) = self.mscale.filter(|mscale| *mscale < 0.0) {
                    let rule = "must be at least 0";
                    return Err(Error::config(path, "rope_scaling.mscale", mscale, rule));
                }
                self.yarn(field("factor", self.factor)?, self.original(path, original)?)
            }
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
        match self.kind() {
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
        let found = self.original_max_position_embeddings.or(outside);
        let original = needed(path, ORIGINAL, found)?;
        if !(1.0..=2_147_483_648.0).contains(&original) {
            let rule = "must be between 1 and 2147483648";
            return Err(Error::config(path, ORIGINAL, original, rule));
        }
        Ok(original)
    }
}

fn needed<T>(path: &Path, name: &str, value: Option<T>) -> Result<T> {
    let field = format!("rope_scaling.{name}");
    value.ok_or_else(|| Error::config(path, field, "missing", "the rope type needs it"))
}

pub(crate) fn check(path: &Path, scaling: &RopeScaling, rotary_dim: usize) -> Result<()> {
    // Heads are far smaller; the frequencies of 2^31 channels would take minutes.
    at_most(path, "channels with rope", rotary_dim, 1 << 16)?;
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
            let original = (ORIGINAL, original_max_positions);
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
            positive(path, ORIGINAL, original)?;
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
            let original = (ORIGINAL, original_max_positions as f64);
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
