//! Policies in JSON and TOML files.
//!
//! A file has `rules`, and optionally a `name`, `n_layers` and a `capacity`. A policy with one rule
//! for all layers, plus layers in float, is written as the fields of [`KvCacheConfig`] and
//! `float_layers`. [`KV_CACHE_FILE`] beside the weights of a trained model has this form.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use kv_cubecl::{Flush, KvCacheConfig, KvFormat, Side};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::{Map, Value};

use super::{
    CAPACITY, LAYERS, LayerRule, Layers, ModelCacheConfig, Stores,
    file_fields::{WrongField, none_left, optional, required},
    name_rule,
    nearest::nearest,
};
use crate::{
    error::{Error, Result},
    files,
    spec::AttentionKind,
};

/// The most tokens of a cache, whose kernels address tokens and words with u32.
const MAX_CAPACITY: usize = 1 << 24;

/// The file beside the weights that contains the cache a model was trained with.
pub const KV_CACHE_FILE: &str = "kv_cache.json";

impl ModelCacheConfig {
    /// Resolves a user's name for a policy: the short name of a cache, a [preset](Self::preset), or
    /// a JSON or TOML file, whose name ends in `.json` or `.toml` in any case.
    ///
    /// # Errors
    /// Fails for a name that is none of these, and as [`read`](Self::read) does.
    pub fn find(name: &str) -> Result<Self> {
        let path = Path::new(name);
        match is_toml(path) || ends_in(path, "json") {
            true => Self::read(path),
            false => name.parse().map_err(|error: Error| match error {
                Error::Cache(kv_cubecl::Error::InvalidCacheName { text, why, expected }) => {
                    let expected = match nearest(&text) {
                        Some(name) => format!("did you mean {name}?"),
                        None => {
                            let presets = Self::PRESETS.join(", ");
                            format!("{expected}, or {presets}, or a .json or .toml file")
                        }
                    };
                    kv_cubecl::Error::InvalidCacheName { text, why, expected }.into()
                }
                other => other,
            }),
        }
    }

    /// Reads a JSON file, or a TOML file if its name ends in `.toml`.
    ///
    /// # Errors
    /// Fails with [`Error::NotFound`] or [`Error::Io`] for a file that cannot be read, with
    /// [`Error::Malformed`] for a syntax error, and with [`Error::Config`] naming a field that is
    /// missing, unknown or wrong.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = files::read_to_string(path)?;
        let (format, fields) = match is_toml(path) {
            true => ("toml", fields_of_toml(&text)),
            false => ("json", serde_json::from_str(&text).map_err(|error| error.to_string())),
        };
        let malformed = |why| Error::Malformed { path: path.into(), format, why };
        Self::from_fields(fields.map_err(malformed)?)
            .map_err(|WrongField { name, value, rule }| Error::config(path, name, value, rule))
    }

    /// Parses TOML.
    ///
    /// # Errors
    /// Fails as [`read`](Self::read) does for a file `policy.toml`.
    pub fn from_toml(text: &str) -> Result<Self> {
        let path = PathBuf::from("policy.toml");
        let fields = fields_of_toml(text);
        let malformed = |why| Error::Malformed { path: path.clone(), format: "toml", why };
        Self::from_fields(fields.map_err(malformed)?)
            .map_err(|WrongField { name, value, rule }| Error::config(&path, name, value, rule))
    }

    /// Returns the policy as TOML. With a rule that has no layer, it cannot be read back.
    pub fn to_toml(&self) -> String {
        // Serialization fails only for keys that are not strings and for numbers beyond TOML's
        // range. A policy has neither.
        toml::to_string(self).unwrap_or_default()
    }

    /// Writes a JSON file, or a TOML file if its name ends in `.toml`. A partial file is never
    /// left.
    ///
    /// # Errors
    /// Fails with [`Error::Write`], and with [`Error::Config`] for a rule without a layer, which
    /// could not be read back.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        for (i, LayerRule { layers, .. }) in self.rules.iter().enumerate() {
            let field = format!("rules[{i}].layers");
            layers.check_any().map_err(|rule| Error::config(path, field, layers, rule))?;
        }
        let bytes = match is_toml(path) {
            true => self.to_toml().into_bytes(),
            false => files::pretty(self),
        };
        files::write(path, &bytes)
    }
}

fn is_toml(path: &Path) -> bool {
    ends_in(path, "toml")
}

/// Returns whether a file's name has this extension, in any case.
fn ends_in(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|it| it.eq_ignore_ascii_case(extension))
}

fn fields_of_toml(text: &str) -> Result<Map<String, Value>, String> {
    toml::from_str(text).map_err(|error: toml::de::Error| {
        let before = error.span().and_then(|span| text.get(..span.start));
        let line = before.map_or(1, |before| before.matches('\n').count() + 1);
        format!("{} at line {line}", error.message())
    })
}

/// The fields of a policy that one cache and float layers cannot express.
#[derive(Serialize)]
struct PolicyFields<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    n_layers: Option<usize>,
    capacity: usize,
    rules: Vec<RuleFields>,
}

#[derive(Default, Serialize)]
struct RuleFields {
    #[serde(skip_serializing_if = "Option::is_none")]
    layers: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attention: Option<AttentionKind>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_bias: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    side: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache: Option<Cache>,
    #[serde(skip_serializing_if = "Option::is_none")]
    format: Option<KvFormat>,
    #[serde(skip_serializing_if = "core::ops::Not::not")]
    hadamard: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    start: Option<usize>,
}

/// A cache by its short name, or by its fields if the name is incomplete, as for groups in float.
#[derive(Serialize)]
#[serde(untagged, expecting = "must be a cache's short name or its fields")]
enum Cache {
    Name(String),
    Fields(Map<String, Value>),
}

/// The fields of a policy with one cache.
#[derive(Serialize)]
struct OneCache {
    #[serde(flatten)]
    cache: KvCacheConfig,
    float_layers: BTreeSet<usize>,
}

impl From<&LayerRule> for RuleFields {
    fn from(rule: &LayerRule) -> Self {
        let layers = (!rule.layers.is_all()).then(|| rule.layers.to_string());
        let LayerRule { attention, key_bias, .. } = *rule;
        let rest = Self { layers, attention, key_bias, ..Self::default() };
        match rule.stores {
            Stores::Cache(cache) => {
                let name = cache.to_string();
                let complete = name.parse::<KvCacheConfig>().is_ok_and(|parsed| parsed == cache);
                let cache = match (complete, serde_json::to_value(cache)) {
                    (false, Ok(Value::Object(mut fields))) => {
                        fields.remove("capacity");
                        Cache::Fields(fields)
                    }
                    _ => Cache::Name(name),
                };
                Self { cache: Some(cache), ..rest }
            }
            Stores::Format { side, format, hadamard } => {
                let side = side.map(|side| side.to_string());
                Self { side, format: Some(format), hadamard, ..rest }
            }
            Stores::Start(tokens) => Self { start: Some(tokens), ..rest },
        }
    }
}

impl Serialize for ModelCacheConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if let Some(one) = self.one_cache() {
            return one.serialize(serializer);
        }
        let rules = self.rules.iter().map(RuleFields::from).collect();
        let (name, n_layers, capacity) = (self.name(), self.n_layers, self.capacity);
        PolicyFields { name, n_layers, capacity, rules }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ModelCacheConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::from_fields(Map::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl ModelCacheConfig {
    /// Returns the fields of a policy with one cache; `None` if they cannot express it.
    fn one_cache(&self) -> Option<OneCache> {
        let ([first, rest @ ..], None, None) = (&self.rules[..], &self.name, self.n_layers) else {
            return None;
        };
        let float_layers = match rest {
            [] => BTreeSet::new(),
            [rule] if rule.is_float() && rule.is_for_any_kind() => {
                // Reading sorts the layers and removes duplicates, so only such lists have this
                // form.
                let numbers = rule.layers.numbers()?;
                numbers.is_sorted_by(|a, b| a < b).then(|| numbers.into_iter().collect())?
            }
            _ => return None,
        };
        match first.stores {
            Stores::Cache(cache) if first.is_for_all() => {
                Some(OneCache { cache: cache.with_capacity(self.capacity), float_layers })
            }
            _ => None,
        }
    }

    /// Reads the fields one by one, because serde's messages name a field only when it is missing.
    fn from_fields(mut fields: Map<String, Value>) -> Result<Self, WrongField> {
        let is_format = |name: &String| matches!(current(name), "key_format" | "value_format");
        let policy = match fields.keys().any(is_format) {
            true => {
                let cache = cache_of(&mut fields)?;
                let capacity = required(&mut fields, "capacity")?;
                let float_layers: BTreeSet<usize> =
                    optional(&mut fields, "float_layers")?.unwrap_or_default();
                Self::from(cache.with_capacity(capacity)).with_float_layers(float_layers)
            }
            false => {
                let rules: Vec<Value> = required(&mut fields, "rules")?;
                if rules.is_empty() {
                    return Err(WrongField::new("rules", "[]", "must have at least one rule"));
                }
                let rule = |(i, value)| {
                    rule_of(value).map_err(|WrongField { name, value, rule }| WrongField {
                        name: match name.is_empty() {
                            true => format!("rules[{i}]"),
                            false => format!("rules[{i}].{name}"),
                        },
                        value,
                        rule,
                    })
                };
                let rules: Vec<LayerRule> =
                    rules.into_iter().enumerate().map(rule).collect::<Result<_, _>>()?;
                let capacity = optional(&mut fields, "capacity")?.unwrap_or(CAPACITY);
                let name: Option<String> = optional(&mut fields, "name")?;
                if let Some(Err(rule)) = name.as_deref().map(name_rule) {
                    return Err(WrongField::new("name", name.unwrap_or_default(), rule));
                }
                let policy = Self { name, ..Self::new(rules) }.with_capacity(capacity);
                match optional(&mut fields, "n_layers")? {
                    None => policy,
                    Some(n) => policy
                        .with_n_layers(n)
                        .map_err(|_| WrongField::new("n_layers", n, LAYERS))?,
                }
            }
        };
        none_left(fields)?;
        match policy.capacity {
            1..=MAX_CAPACITY => Ok(policy),
            wrong => Err(WrongField::new("capacity", wrong, "must be 1 to 16777216 tokens")),
        }
    }
}

/// Returns the current name of a cache's field, which earlier versions may have named differently.
fn current(name: &str) -> &str {
    let renamed = KvCacheConfig::FORMER_FIELDS.iter().find(|(former, _)| *former == name);
    renamed.map_or(name, |(_, current)| current)
}

/// Takes the fields of a cache, except for its capacity.
fn cache_of(fields: &mut Map<String, Value>) -> Result<KvCacheConfig, WrongField> {
    for (former, name) in KvCacheConfig::FORMER_FIELDS {
        if let Some(value) = fields.remove(*former)
            && fields.insert(name.to_string(), value.clone()).is_some()
        {
            return Err(WrongField::new(former, value, format!("is also given as {name}")));
        }
    }
    let keys: KvFormat = required(fields, "key_format")?;
    let values: KvFormat = required(fields, "value_format")?;
    let flush: Flush = required(fields, "flush")?;
    // Earlier versions wrote `sliding` for `flush: group`.
    let by_group = optional(fields, "sliding")?.unwrap_or_default();
    Ok(KvCacheConfig::new(keys, values)
        .with_group_size(required(fields, "group_size")?)
        .with_residual_length(required(fields, "residual_length")?)
        .with_flush(flush.with_groups(by_group || flush.is_by_group()))
        .with_sink_tokens(required(fields, "sink_tokens")?)
        .with_float(required(fields, "float")?)
        .with_hadamard_values(optional(fields, "hadamard_values")?.unwrap_or_default())
        .with_hadamard_keys(optional(fields, "hadamard_keys")?.unwrap_or_default())
        .with_sliding_window(optional(fields, "sliding_window")?)
        .with_tile(optional(fields, "tile")?.unwrap_or_default())
        .with_stagger(optional(fields, "stagger")?.unwrap_or_default())
        .with_ranges(
            optional(fields, "key_range")?.unwrap_or_default(),
            optional(fields, "value_range")?.unwrap_or_default(),
        ))
}

fn rule_of(value: Value) -> Result<LayerRule, WrongField> {
    let Value::Object(mut fields) = value else {
        return Err(WrongField::new("", value, "must be a table"));
    };
    let layers = match fields.remove("layers") {
        None => Layers::all(),
        Some(value) => {
            Layers::from_value(&value).map_err(|rule| WrongField::new("layers", value, rule))?
        }
    };
    let attention = optional(&mut fields, "attention")?;
    let key_bias = optional(&mut fields, "key_bias")?;
    let stores = match stored_field(&fields)? {
        "cache" => Stores::Cache(named_cache(fields.remove("cache").unwrap_or_default())?),
        "format" => format_of(&mut fields)?,
        _ => Stores::Start(required(&mut fields, "start")?),
    };
    let [side, hadamard] = match stores {
        Stores::Cache(_) => [
            "a cache sets both sides; use format for one side",
            "use -hadk or -hadv in the name of the cache",
        ],
        _ => ["start applies to both sides", FLOAT_HAS_NO_HADAMARD],
    };
    for (name, rule) in [("side", side), ("hadamard", hadamard), ("rotate", hadamard)] {
        if let Some(value) = fields.remove(name) {
            return Err(WrongField::new(name, value, rule));
        }
    }
    none_left(fields)?;
    Ok(LayerRule { layers, attention, key_bias, stores })
}

/// Returns the field that contains what a rule stores. A rule has exactly one: the order of two
/// fields would be ambiguous, so they take two rules.
fn stored_field(fields: &Map<String, Value>) -> Result<&'static str, WrongField> {
    let has = |name: &&str| fields.contains_key(*name);
    match ["cache", "format", "start"].into_iter().filter(has).collect::<Vec<_>>()[..] {
        [one] => Ok(one),
        [] => Err(WrongField::new("cache", "missing", "a rule needs a cache, a format or a start")),
        [first, ..] => {
            let rule = "a rule can have only one of cache, format and start";
            Err(WrongField::new(first, &fields[first], rule))
        }
    }
}

/// Parses a cache from its short name or its fields.
fn named_cache(cache: Value) -> Result<KvCacheConfig, WrongField> {
    match cache {
        Value::String(name) => {
            name.parse().map_err(|error: kv_cubecl::Error| WrongField::new("cache", &name, error))
        }
        Value::Object(mut fields) => {
            let cache = cache_of(&mut fields).and_then(|cache| none_left(fields).map(|()| cache));
            cache.map_err(|wrong| WrongField { name: format!("cache.{}", wrong.name), ..wrong })
        }
        other => Err(WrongField::new("cache", other, "must be the name of a cache")),
    }
}

/// Takes the format of one side or of both.
fn format_of(fields: &mut Map<String, Value>) -> Result<Stores, WrongField> {
    let format: KvFormat = required(fields, "format")?;
    let side = match optional::<String>(fields, "side")?.as_deref() {
        None => None,
        Some("keys") => Some(Side::Keys),
        Some("values") => Some(Side::Values),
        Some(other) => return Err(WrongField::new("side", other, "must be keys or values")),
    };
    // Earlier versions wrote `rotate`.
    let hadamard = match optional(fields, "rotate")? {
        Some(hadamard) => hadamard,
        None => optional(fields, "hadamard")?.unwrap_or_default(),
    };
    match hadamard && !format.is_quantized() {
        true => Err(WrongField::new("hadamard", true, FLOAT_HAS_NO_HADAMARD)),
        false => Ok(Stores::Format { side, format, hadamard }),
    }
}

const FLOAT_HAS_NO_HADAMARD: &str = "only quantized sides have a Hadamard transform";
