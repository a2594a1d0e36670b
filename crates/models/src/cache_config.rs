//! What the caches of a model's layers store: [`ModelCacheConfig`].

use std::{collections::BTreeSet, fmt, path::Path};

use kv_cubecl::{Bits, KvCacheConfig};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{DeserializeOwned, Error as _},
};
use serde_json::{Map, Value};

use crate::{Error, LayerSpec, ModelSpec, Result, files};

/// The file that says which cache a model was trained with, beside its weights.
pub const KV_CACHE_FILE: &str = "kv_cache.json";

/// The [`KvCacheConfig`] of all layers of a model, except for some layers that stay in float.
///
/// Its JSON has the fields of [`KvCacheConfig`], and `float_layers`, which may be left out:
///
/// ```
/// use kv_models::{LayerSpec, ModelCacheConfig};
///
/// let text = r#"{
///     "key_bits": 2, "value_bits": 2, "group_size": 32, "residual_length": 128,
///     "flush": "before", "sink_tokens": 4, "capacity": 4096, "float": "f32",
///     "float_layers": [0, 29]
/// }"#;
/// let config: ModelCacheConfig = serde_json::from_str(text)?;
/// assert_eq!(config.to_string(), "k2v2-s4 float layers 0,29");
/// let layer = LayerSpec::new(9, 3, 64).with_window(Some(512));
/// assert!(!config.layer(29, &layer).is_quantized());
/// assert_eq!(config.layer(1, &layer).window, Some(512));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelCacheConfig {
    /// What a layer's cache stores.
    #[serde(flatten)]
    pub cache: KvCacheConfig,
    /// Layers, counted from 0, whose keys and values stay in float.
    pub float_layers: BTreeSet<usize>,
}

impl ModelCacheConfig {
    /// What the cache of layer `index`, which is `layer`, stores. The window is the layer's, or the configuration's
    /// if that is shorter. A layer with a window of its own keeps no sinks: it was trained without its first tokens.
    pub fn layer(&self, index: usize, layer: &LayerSpec) -> KvCacheConfig {
        let mut cache = self.cache;
        if self.float_layers.contains(&index) {
            cache = cache.with_bits(Bits::Float, Bits::Float);
        }
        match layer.window {
            None => cache,
            Some(window) => {
                let window = cache.window.map_or(window, |asked| asked.min(window));
                cache.with_window(Some(window)).with_sink_tokens(0)
            }
        }
    }

    /// What a user should know of the caches of a model of `spec`: layers with a window of their own keep no sinks
    /// and no tokens beyond it.
    pub fn note(&self, spec: &ModelSpec) -> Option<String> {
        let windows: Vec<usize> = spec.layers.iter().filter_map(|layer| layer.window).collect();
        let shortest = windows.iter().copied().min()?;
        let rule = match (self.cache.sink_tokens, self.cache.window) {
            (0, Some(asked)) if asked > shortest => "keep no more than that",
            (0, _) => return None,
            _ => "keep no sinks",
        };
        let (n, all) = (windows.len(), spec.layers.len());
        Some(format!("{self}: {n} of {all} layers have a window of their own and {rule}"))
    }

    /// Checks that the configuration fits `model`.
    ///
    /// # Errors
    ///
    /// A cache that does not fit the heads of a layer, or a float layer that the model does not
    /// have.
    pub fn validate(&self, model: impl AsRef<ModelSpec>) -> Result<()> {
        let layers = &model.as_ref().layers;
        let of_layer = |(i, layer): (usize, &LayerSpec)| {
            self.cache.validate(layer.head_dim)?;
            self.layer(i, layer).validate(layer.head_dim)
        };
        layers.iter().enumerate().try_for_each(of_layer)?;
        match self.float_layers.last() {
            Some(&layer) if layer >= layers.len() => {
                let rule = format!("the model has layers 0 to {}", layers.len().saturating_sub(1));
                Err(Error::argument("float_layers", layer, rule))
            }
            _ => Ok(()),
        }
    }

    /// Reads a JSON file.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] or [`Error::Io`] for a file that cannot be read, [`Error::Malformed`]
    /// for one that is not a JSON object, and [`Error::Config`] naming a field that is missing,
    /// unknown or wrong.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = files::read_to_string(path)?;
        let fields: Map<String, Value> = serde_json::from_str(&text).map_err(|error| {
            Error::Malformed { path: path.into(), format: "json", why: error.to_string() }
        })?;
        Self::from_fields(fields)
            .map_err(|WrongField { name, value, rule }| Error::config(path, name, value, rule))
    }

    /// Writes a JSON file, whole or not at all.
    ///
    /// # Errors
    ///
    /// [`Error::Write`].
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        files::write(path.as_ref(), &files::pretty(self))
    }
}

impl From<KvCacheConfig> for ModelCacheConfig {
    fn from(cache: KvCacheConfig) -> Self {
        Self { cache, float_layers: BTreeSet::new() }
    }
}

impl From<&KvCacheConfig> for ModelCacheConfig {
    fn from(cache: &KvCacheConfig) -> Self {
        Self::from(*cache)
    }
}

impl From<&ModelCacheConfig> for ModelCacheConfig {
    fn from(config: &ModelCacheConfig) -> Self {
        config.clone()
    }
}

impl fmt::Display for ModelCacheConfig {
    /// The cache's short name, then the float layers if there are any.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.cache)?;
        for (i, layer) in self.float_layers.iter().enumerate() {
            write!(f, "{}{layer}", if i == 0 { " float layers " } else { "," })?;
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for ModelCacheConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::from_fields(Map::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl ModelCacheConfig {
    /// Reads the fields one by one, because serde's own messages name a field only when it is
    /// missing.
    fn from_fields(mut fields: Map<String, Value>) -> Result<Self, WrongField> {
        let (keys, values) = (bits(&mut fields, "key_bits")?, bits(&mut fields, "value_bits")?);
        let cache = KvCacheConfig::kivi(keys, values)
            .with_group_size(required(&mut fields, "group_size")?)
            .with_residual_length(required(&mut fields, "residual_length")?)
            .with_flush(required(&mut fields, "flush")?)
            .with_sink_tokens(required(&mut fields, "sink_tokens")?)
            .with_capacity(required(&mut fields, "capacity")?)
            .with_float(required(&mut fields, "float")?)
            .with_sliding(optional(&mut fields, "sliding")?.unwrap_or_default())
            .with_rotate_values(optional(&mut fields, "rotate_values")?.unwrap_or_default())
            .with_window(optional(&mut fields, "window")?);
        let float_layers = optional(&mut fields, "float_layers")?.unwrap_or_default();
        match fields.into_iter().next() {
            None => Ok(Self { cache, float_layers }),
            Some((name, value)) => {
                Err(WrongField { name, value: value.to_string(), rule: "unknown field".into() })
            }
        }
    }
}

/// A field of a file that breaks a rule.
#[derive(Debug, thiserror::Error)]
#[error("{name} = {value}: {rule}")]
struct WrongField {
    name: String,
    value: String,
    rule: String,
}

fn optional<T: DeserializeOwned>(
    fields: &mut Map<String, Value>,
    name: &str,
) -> Result<Option<T>, WrongField> {
    let Some(value) = fields.remove(name) else { return Ok(None) };
    let text = value.to_string();
    serde_json::from_value(value).map(Some).map_err(|error| WrongField {
        name: name.into(),
        value: text,
        rule: error.to_string(),
    })
}

fn required<T: DeserializeOwned>(
    fields: &mut Map<String, Value>,
    name: &str,
) -> Result<T, WrongField> {
    optional(fields, name)?.ok_or_else(|| WrongField {
        name: name.into(),
        value: "missing".into(),
        rule: "the file needs it".into(),
    })
}

fn bits(fields: &mut Map<String, Value>, name: &str) -> Result<Bits, WrongField> {
    let n_bits: u64 = required(fields, name)?;
    u8::try_from(n_bits).ok().and_then(|n| Bits::try_from(n).ok()).ok_or_else(|| WrongField {
        name: name.into(),
        value: n_bits.to_string(),
        rule: "must be 2, 4, 8, or 16 for float".into(),
    })
}
