//! Rules for the fields of a model's configuration, in any kind of file. Errors name the file
//! `path`.

use std::{collections::BTreeSet, path::Path};

use serde_json::{Map, Value, json};

use crate::error::{Error, Result};

/// Returns the value of a required field.
///
/// # Errors
/// Returns [`Error::Config`] if the value is missing.
pub fn required<T>(path: &Path, field: &str, value: Option<T>) -> Result<T> {
    value.ok_or_else(|| Error::config(path, field, "missing", "the model needs it"))
}

/// Checks numbers of tokens, layers, heads or channels.
///
/// # Errors
/// Returns [`Error::Config`] for the first number that is 0 or above 2^31.
pub fn sizes(path: &Path, fields: &[(&str, usize)]) -> Result<()> {
    match fields.iter().find(|(_, value)| *value == 0 || *value > 1 << 31) {
        None => Ok(()),
        Some(&(field, value)) => {
            Err(Error::config(path, field, value, "must be between 1 and 2147483648"))
        }
    }
}

/// Checks the number of experts in `field`, and how many of them compute each token.
///
/// # Errors
/// Returns [`Error::Config`] for a number that is 0 or above 2^31, and for more experts per token
/// than there are.
pub(crate) fn experts(
    path: &Path,
    (field, n_experts): (&str, usize),
    per_token: usize,
) -> Result<()> {
    let of_token = "num_experts_per_tok";
    sizes(path, &[(field, n_experts), (of_token, per_token)])?;
    if per_token > n_experts {
        let rule = format!("must be at most {field} {n_experts}");
        return Err(Error::config(path, of_token, per_token, rule));
    }
    Ok(())
}

/// Checks a number of layers before anything is computed per layer. Plans compare layers with each
/// other, and published models have fewer than 200.
///
/// # Errors
/// Returns [`Error::Config`] if the number is 0 or above 1024.
pub fn layers(path: &Path, field: &str, n_layers: usize) -> Result<usize> {
    match n_layers {
        1..=1024 => Ok(n_layers),
        _ => Err(Error::config(path, field, n_layers, "must be between 1 and 1024")),
    }
}

/// Checks a number that must be finite and above 0, also as f32.
///
/// # Errors
/// Returns [`Error::Config`] if it is not.
pub fn positive(path: &Path, field: &str, value: f64) -> Result<()> {
    let narrow = value as f32;
    if narrow.is_finite() && narrow > 0.0 {
        return Ok(());
    }
    Err(Error::config(path, field, format!("{value:?}"), "must be finite and above 0 in f32"))
}

/// Checks a number that must be at most `most`.
///
/// # Errors
/// Returns [`Error::Config`] if it is not.
pub(crate) fn at_most(path: &Path, field: &str, value: usize, most: usize) -> Result<()> {
    match value <= most {
        true => Ok(()),
        false => Err(Error::config(path, field, value, format!("must be at most {most}"))),
    }
}

/// Checks a number of channels that consists of pairs, which rope needs.
///
/// # Errors
/// Returns [`Error::Config`] if it does not.
pub(crate) fn even(path: &Path, field: &str, value: usize) -> Result<()> {
    match value % 2 {
        0 => Ok(()),
        _ => Err(Error::config(path, field, value, "must be even")),
    }
}

/// Checks that the key-value heads in `field` divide the query heads evenly.
///
/// # Errors
/// Returns [`Error::Config`] if they do not.
pub(crate) fn kv_heads(
    path: &Path,
    (field, n_kv_heads): (&str, usize),
    n_heads: usize,
) -> Result<()> {
    match n_heads.is_multiple_of(n_kv_heads) {
        true => Ok(()),
        false => {
            let rule = format!("does not divide num_attention_heads {n_heads}");
            Err(Error::config(path, field, n_kv_heads, rule))
        }
    }
}

/// Returns `fields` and the fields of the object `more`, which replace others of the same name.
pub(crate) fn extended(mut fields: Map<String, Value>, more: Value) -> Map<String, Value> {
    if let Value::Object(more) = more {
        fields.extend(more);
    }
    fields
}

/// Returns the channels of a head, for files that give only the width of the model in `field` and
/// the number of heads in `heads_field`.
///
/// # Errors
/// Returns [`Error::Config`] if the number of heads does not divide the width.
pub fn head_dim(
    path: &Path,
    (field, width): (&str, usize),
    (heads_field, n_heads): (&str, usize),
) -> Result<usize> {
    if n_heads > 0 && width.is_multiple_of(n_heads) {
        return Ok(width / n_heads);
    }
    let rule = format!("is not divisible by {heads_field} {n_heads}");
    Err(Error::config(path, field, width, rule))
}

/// Kinds of layers in `layer_types`.
pub(crate) const FULL: &str = "full_attention";
pub(crate) const SLIDING: &str = "sliding_attention";

/// Returns the layers with full attention in `layer_types`.
///
/// # Errors
/// Fails if the number of layers is not `n_layers`, or a kind of attention is not supported.
pub(crate) fn full_layers(
    path: &Path,
    layer_types: &[String],
    n_layers: usize,
) -> Result<BTreeSet<usize>> {
    if let Some(kind) = layer_types.iter().find(|kind| !matches!(kind.as_str(), FULL | SLIDING)) {
        let why =
            format!("{} has it in layer_types; {FULL} and {SLIDING} are supported", path.display());
        return Err(Error::unsupported(format!("attention {kind}"), why));
    }
    if layer_types.len() != n_layers {
        let rule = format!("must be num_hidden_layers {n_layers}");
        return Err(Error::config(path, "length of layer_types", layer_types.len(), rule));
    }
    Ok((0..n_layers).filter(|&i| layer_types[i] == FULL).collect())
}

/// The sizes that have the same names in `config.json` of most families.
pub(crate) struct DecoderSizes {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) n_layers: usize,
    pub(crate) n_heads: usize,
    pub(crate) n_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) max_positions: usize,
}

impl DecoderSizes {
    fn fields(&self) -> [(&'static str, usize); 8] {
        [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.n_layers),
            ("num_attention_heads", self.n_heads),
            ("num_key_value_heads", self.n_kv_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_positions),
        ]
    }

    /// Checks the sizes, the fields in `more`, and that key-value heads divide query heads evenly.
    pub(crate) fn check(&self, path: &Path, more: &[(&str, usize)]) -> Result<()> {
        sizes(path, &self.fields())?;
        sizes(path, more)?;
        kv_heads(path, ("num_key_value_heads", self.n_kv_heads), self.n_heads)
    }

    /// Returns the fields of `config.json`: the sizes, then the fields of the object `more`.
    pub(crate) fn to_json(&self, more: Value) -> Map<String, Value> {
        let sizes = self.fields().map(|(field, value)| (field.to_string(), json!(value)));
        extended(sizes.into_iter().collect(), more)
    }

    /// Returns `layer_types`; the layers in `full` have full attention.
    pub(crate) fn layer_types(&self, full: &BTreeSet<usize>) -> Vec<&'static str> {
        (0..self.n_layers).map(|i| if full.contains(&i) { FULL } else { SLIDING }).collect()
    }
}
