//! The metadata of a saved cache.

use core::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::super::layer::LayerConfig;
use crate::{
    cache_config::ModelCacheConfig,
    chat::Message,
    error::Result,
    family::JsonFields,
    model::LanguageModel,
    nn::Rope,
    spec::{LayerSpec, ModelSpec},
};

/// The version that is written. Version 1, which has no checkpoints, version 2, in which all layers
/// have keys and values, and version 3, which has no configuration, are also read.
pub(super) const VERSION: u32 = 4;

/// The fields of a configuration that are not compared. The first three do not change what a model
/// computes, and [`RopeMark`] describes the others.
const NOT_COMPARED: [&str; 6] = [
    "architectures",
    "model_type",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
];

/// The metadata of a saved cache, as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) model: Maker,
    /// The attention and the cache of each layer that owns a cache.
    pub(super) layers: Vec<Layer>,
    /// The ropes that were applied to keys.
    pub(super) ropes: Vec<RopeMark>,
    /// Tokens of each sequence.
    pub(super) lens: Vec<usize>,
    /// The user's name for the policy of the cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) cache: Option<String>,
    /// The conversation; empty if the tokens are not a conversation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) talk: Vec<Message>,
    /// Tokens at each checkpoint, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) checkpoints: Vec<usize>,
    /// The salt of a prompt that a prefix cache saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) salt: Option<String>,
    /// The tokens of a block of that prefix cache; files of earlier versions do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) block_tokens: Option<usize>,
}

/// The model that filled the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Maker {
    /// The user's name for the model. It is not compared.
    pub(super) name: String,
    /// [`Decoder::name`](crate::Decoder::name).
    pub(super) decoder: String,
    pub(super) vocab_size: usize,
    pub(super) hidden_size: usize,
    /// A checksum of samples of all weights.
    pub(super) weights: String,
    /// The storage of the weights, see [`kept_weights`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) kept: Option<String>,
    /// The configuration, as in `config.json`, if the family can express it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    config: Option<JsonFields>,
}

/// Returns how the weights of a model are stored: `packed`, or their type.
pub(super) fn kept_weights(model: &LanguageModel) -> String {
    match model.is_packed() {
        true => "packed".into(),
        false => model.weight_dtype().to_string(),
    }
}

/// The attention of one layer and its cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Layer {
    pub(super) n_heads: usize,
    pub(super) n_kv_heads: usize,
    /// Channels of a head of keys and of values.
    pub(super) head_dim: [usize; 2],
    /// True if values are channels of keys.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub(super) shares_values: bool,
    pub(super) scale: Option<f32>,
    pub(super) softcap: Option<f32>,
    #[serde(alias = "window")]
    pub(super) sliding_window: Option<usize>,
    pub(super) rope: Option<usize>,
    /// The format of the cache. Its capacity is the number of saved tokens.
    pub(super) cache: LayerConfig,
}

/// The identity of a rope.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RopeMark {
    pub(super) rotary_dim: usize,
    /// A checksum of its frequencies and of the scale of sines and cosines.
    pub(super) frequencies: String,
}

impl Maker {
    pub(super) fn new(model: &LanguageModel, name: &str) -> Result<Self> {
        let &ModelSpec { vocab_size, hidden_size, .. } = model.spec();
        Ok(Self {
            name: name.into(),
            decoder: model.decoder().name().into(),
            vocab_size,
            hidden_size,
            weights: super::fingerprint::of_weights(model)?,
            kept: Some(kept_weights(model)),
            config: model.decoder().config_json(Path::new("config.json")).ok(),
        })
    }

    /// Compares sizes with the model `asked` for. Returns the first field that differs, its value
    /// in the file, and the rule for the message.
    pub(super) fn other_sizes(&self, asked: &Self) -> Option<(&'static str, String, String)> {
        let sizes = [
            ("model.decoder", &self.decoder, &asked.decoder),
            ("model.vocab_size", &self.vocab_size.to_string(), &asked.vocab_size.to_string()),
            ("model.hidden_size", &self.hidden_size.to_string(), &asked.hidden_size.to_string()),
        ];
        let (field, here, there) = sizes.into_iter().find(|(_, here, there)| here != there)?;
        let rule = format!("this model has {there}; the cache belongs to {}", self.name);
        Some((field, here.clone(), rule))
    }

    /// Compares the weights with the model `asked` for; returns what
    /// [`other_sizes`](Self::other_sizes) does.
    pub(super) fn other_weights(&self, asked: &Self) -> Option<(&'static str, String, String)> {
        if self.weights == asked.weights {
            return None;
        }
        match (&self.kept, &asked.kept) {
            (Some(here), Some(there)) if here != there => Some((
                "weights",
                here.clone(),
                format!(
                    "this model has {there} weights; load it with the same --weights and --dtype"
                ),
            )),
            _ => Some((
                "model",
                self.name.clone(),
                "its weights differ from this model's; load the model that filled the cache".into(),
            )),
        }
    }

    /// Compares the configuration with the model `asked` for; returns what
    /// [`other_sizes`](Self::other_sizes) does. A field that only one of them has is of another
    /// version of this crate.
    pub(super) fn other_config(&self, asked: &Self) -> Option<(String, String, String)> {
        let (here, there) = (self.config.as_ref()?, asked.config.as_ref()?);
        let compared = here.iter().filter(|(name, _)| !NOT_COMPARED.contains(&name.as_str()));
        let mut pairs = compared.filter_map(|(name, here)| Some((name, here, there.get(name)?)));
        let (name, here, there) = pairs.find(|(_, here, there)| !same(here, there))?;
        let rule = format!("this model has {there}; the cache belongs to {}", self.name);
        Some((format!("model.{name}"), here.to_string(), rule))
    }
}

/// Compares values of two configurations. GGUF files have numbers in f32.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(x), Value::Number(y)) => match (x.as_f64(), y.as_f64()) {
            (Some(x), Some(y)) => x as f32 == y as f32,
            _ => x == y,
        },
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
        }
        _ => a == b,
    }
}

/// Returns an optional value in words.
fn optional(value: Option<impl fmt::Debug>) -> String {
    value.map_or_else(|| "none".into(), |value| format!("{value:?}"))
}

impl Layer {
    /// Describes a layer with this cache.
    pub(super) fn new(layer: &LayerSpec, cache: LayerConfig) -> Self {
        // The cache describes sparse attention, and the weights are compared, biases included.
        let LayerSpec {
            n_heads,
            n_kv_heads,
            head_dim,
            options,
            sliding_window,
            rope,
            key_bias: _,
            sparse: _,
            delta: _,
            latent: _,
            shared: _,
        } = *layer;
        let shares_values = layer.shares_values();
        let (head_dim, scale, softcap) = (head_dim.into_array(), options.scale, options.softcap);
        Self {
            n_heads,
            n_kv_heads,
            head_dim,
            shares_values,
            scale,
            softcap,
            sliding_window,
            rope,
            cache,
        }
    }

    /// Describes all layers of a model that own a cache, for `tokens` tokens in caches of `config`.
    pub(super) fn all(spec: &ModelSpec, config: &ModelCacheConfig, tokens: usize) -> Vec<Self> {
        let cache = |i: usize, layer: &LayerSpec| {
            LayerConfig::new(layer, &config.layer(spec, i)).with_capacity(tokens)
        };
        spec.owners().map(|(i, layer)| Self::new(layer, cache(i, layer))).collect()
    }

    /// Returns the first field in which `other` differs, and both values.
    pub(super) fn difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let text = |value: &dyn fmt::Debug| format!("{value:?}");
        let fields = |it: &Self| {
            [
                ("n_heads", text(&it.n_heads)),
                ("n_kv_heads", text(&it.n_kv_heads)),
                ("head_dim", text(&it.head_dim)),
                ("shares_values", text(&it.shares_values)),
                ("scale", optional(it.scale)),
                ("softcap", optional(it.softcap)),
                ("sliding_window", optional(it.sliding_window)),
                ("rope", optional(it.rope)),
            ]
        };
        let pairs = fields(self).into_iter().zip(fields(other));
        let mut pairs = pairs.map(|((field, here), (_, there))| (field, here, there));
        pairs.find(|(_, here, there)| here != there).or_else(|| self.cache.difference(&other.cache))
    }
}

impl RopeMark {
    /// Describes the ropes of a model whose cache has a capacity of `room` positions. The
    /// frequencies of some ropes depend on it.
    pub(super) fn all(spec: &ModelSpec, room: usize) -> Vec<Self> {
        let mark = |rope: &Rope| Self {
            rotary_dim: rope.rotary_dim(),
            frequencies: super::fingerprint::of_numbers(&rope.numbers(room)),
        };
        spec.ropes.iter().map(mark).collect()
    }
}
