//! What a file says of the cache in it.

use kv_cubecl::KvCacheConfig;
use serde::{Deserialize, Serialize};

use crate::{
    LanguageModel, LayerSpec, ModelCacheConfig, ModelSpec, Result, chat::Message, nn::Rope,
};

/// The version of the format that is written. Version 1, which has no checkpoints, is read as well.
pub(super) const VERSION: u32 = 2;

/// The metadata of a saved cache, as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) model: Maker,
    /// What each layer remembers.
    pub(super) layers: Vec<Layer>,
    /// The rotary encodings that keys were rotated by.
    pub(super) ropes: Vec<RopeMark>,
    /// Tokens of each sequence.
    pub(super) lens: Vec<usize>,
    /// What the user calls the policy of the cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) cache: Option<String>,
    /// The conversation, if it is one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) talk: Vec<Message>,
    /// Tokens at each checkpoint, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) checkpoints: Vec<usize>,
}

/// The model that filled the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Maker {
    /// What the user calls it; another name is no other model.
    pub(super) name: String,
    /// [`Decoder::name`](crate::Decoder::name).
    pub(super) decoder: String,
    pub(super) vocab_size: usize,
    pub(super) hidden_size: usize,
    /// A checksum of samples of all weights.
    pub(super) weights: String,
    /// How the weights are kept, see [`kept_weights`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) kept: Option<String>,
}

/// How the weights of a model are kept: `packed`, or their type.
pub(super) fn kept_weights(model: &LanguageModel) -> String {
    match model.is_packed() {
        true => "packed".into(),
        false => model.weight_dtype().to_string(),
    }
}

/// One layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Layer {
    pub(super) n_heads: usize,
    pub(super) n_kv_heads: usize,
    /// Of keys and of values.
    pub(super) head_dim: [usize; 2],
    pub(super) scale: Option<f32>,
    pub(super) softcap: Option<f32>,
    #[serde(alias = "window")]
    pub(super) sliding_window: Option<usize>,
    pub(super) rope: Option<usize>,
    /// With a capacity of the tokens that are saved.
    pub(super) cache: KvCacheConfig,
}

/// What tells a rotary encoding from another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RopeMark {
    pub(super) rotary_dim: usize,
    /// A checksum of its frequencies and of what scales sines and cosines.
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
        })
    }

    /// The first size in which the model `asked` for differs: the field, its value here, and what
    /// to say of the other.
    pub(super) fn other_sizes(&self, asked: &Self) -> Option<(&'static str, String, String)> {
        let sizes = [
            ("model.decoder", &self.decoder, &asked.decoder),
            ("model.vocab_size", &self.vocab_size.to_string(), &asked.vocab_size.to_string()),
            ("model.hidden_size", &self.hidden_size.to_string(), &asked.hidden_size.to_string()),
        ];
        let (field, here, there) = sizes.into_iter().find(|(_, here, there)| here != there)?;
        let rule = format!("this model has {there}; the cache is one of {}", self.name);
        Some((field, here.clone(), rule))
    }

    /// Whether the weights of the model `asked` for are others, said as by
    /// [`other_sizes`](Self::other_sizes).
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
                "its weights are not those of this model; load the model that filled the cache"
                    .into(),
            )),
        }
    }
}

impl Layer {
    /// A layer whose cache is `cache`.
    pub(super) fn new(layer: &LayerSpec, cache: KvCacheConfig) -> Self {
        let LayerSpec { n_heads, n_kv_heads, head_dim, options, sliding_window, rope } = *layer;
        let (head_dim, scale, softcap) = (head_dim.into_array(), options.scale, options.softcap);
        Self { n_heads, n_kv_heads, head_dim, scale, softcap, sliding_window, rope, cache }
    }

    /// All layers of a model with caches of `config` for so many tokens.
    pub(super) fn all(spec: &ModelSpec, config: &ModelCacheConfig, tokens: usize) -> Vec<Self> {
        let layers = spec.layers.iter().enumerate();
        let cache = |i| config.layer(spec, i).with_capacity(tokens);
        layers.map(|(i, layer)| Self::new(layer, cache(i))).collect()
    }

    /// The first field in which `other` differs, its value here and there. Caches are compared by their names, which
    /// say all that matters.
    pub(super) fn difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let text = |value: &dyn core::fmt::Debug| format!("{value:?}");
        let fields = |it: &Self| {
            [
                ("n_heads", text(&it.n_heads)),
                ("n_kv_heads", text(&it.n_kv_heads)),
                ("head_dim", text(&it.head_dim)),
                ("scale", text(&it.scale)),
                ("softcap", text(&it.softcap)),
                ("sliding_window", text(&it.sliding_window)),
                ("rope", text(&it.rope)),
                ("cache", it.cache.to_string()),
            ]
        };
        let pairs = fields(self).into_iter().zip(fields(other));
        let mut pairs = pairs.map(|((field, here), (_, there))| (field, here, there));
        pairs.find(|(_, here, there)| here != there)
    }
}

impl RopeMark {
    /// Those of a model whose cache has room for `room` positions, by which some choose their frequencies.
    pub(super) fn all(spec: &ModelSpec, room: usize) -> Vec<Self> {
        let mark = |rope: &Rope| Self {
            rotary_dim: rope.rotary_dim(),
            frequencies: super::fingerprint::of_numbers(&rope.numbers(room)),
        };
        spec.ropes.iter().map(mark).collect()
    }
}
