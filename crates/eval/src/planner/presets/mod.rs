//! Models known by name: a file each, with the numbers that its authors published.
//!
//! A file has `names` (the first is shown), `source`, and one of
//! - `config`, a `config.json` of a family that `kv-models` knows, reduced to the fields that
//!   decide bytes, with `parameters` as its authors count them;
//! - `layers` of plain attention for a model whose weights are not counted, with the tokens of a
//!   frame in `frame`;
//! - `formula`: the bytes of a cache that this project does not implement, in parts.

use burn::tensor::Device;
use kv_models::{
    ConfigJson, LayerSpec, LoadOptions, ModelOutline, ModelSpec, WeightBytes, outline_config,
};
use serde::Deserialize;
use serde_json::Value;

use super::{Formula, MOST_TOKENS, Subject};
use crate::{Error, Result};

const FILES: &[&str] = &[
    include_str!("smollm-135m.json"),
    include_str!("smollm-360m.json"),
    include_str!("smollm2-135m.json"),
    include_str!("smollm2-360m.json"),
    include_str!("smollm2-1.7b.json"),
    include_str!("gpt2.json"),
    include_str!("qwen2.5-0.5b.json"),
    include_str!("phi-3-mini.json"),
    include_str!("phi-4-mini.json"),
    include_str!("llama-3.1-8b.json"),
    include_str!("gemma-3-270m.json"),
    include_str!("gemma-3-1b.json"),
    include_str!("gemma-3-4b.json"),
    include_str!("gpt-oss-20b.json"),
    include_str!("deepseek-v3.json"),
    include_str!("deepseek-v4-flash.json"),
    include_str!("deepseek-v4-pro.json"),
    include_str!("gamerft.json"),
];

/// A model known by name.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Preset {
    /// The name, in any case.
    pub names: Vec<String>,
    /// The publication of its numbers.
    pub source: String,
    /// Parameters, as its authors count them.
    pub parameters: Option<u64>,
    /// Notes on the numbers for the user.
    pub note: Option<String>,
    /// The tokens of a frame, for a model of frames.
    pub frame: Option<Frame>,
    config: Option<Value>,
    layers: Option<Layers>,
    formula: Option<Formula>,
}

/// A frame as entries of a token cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Frame {
    /// Tokens of a frame.
    pub tokens: usize,
    /// Frames that the model's cache holds.
    pub ring: usize,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Layers {
    n_layers: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    hidden_size: usize,
}

impl Preset {
    /// Returns all presets.
    pub fn all() -> Vec<Self> {
        let read = |text: &&str| serde_json::from_str(text).expect("a test reads every preset");
        FILES.iter().map(read).collect()
    }

    /// Finds a preset by its name, which may be its name on the hub.
    pub fn find(name: &str) -> Option<Self> {
        let called = |preset: &Self| preset.names.iter().any(|own| own.eq_ignore_ascii_case(name));
        Self::all().into_iter().find(called)
    }

    /// Returns the name to show.
    pub fn name(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }

    /// Returns the formula of its cache, if it has one.
    pub fn formula(&self) -> Option<&Formula> {
        self.formula.as_ref()
    }

    /// Returns the model as loaded with `options` onto `device`.
    ///
    /// # Errors
    /// A type or packed weights that the device does not support.
    pub fn subject(&self, device: &Device, options: LoadOptions) -> Result<Subject> {
        let subject = match (&self.config, &self.layers, &self.formula) {
            (Some(config), None, None) => {
                let (text, path) = (config.to_string(), std::path::Path::new(self.name()));
                let config = ConfigJson { text: &text, path };
                Subject::of_files(self.name(), outline_config(&config, None, device, options)?)
            }
            (None, Some(layers), None) => {
                let Layers { n_layers, n_heads, n_kv_heads, head_dim, hidden_size } = *layers;
                let layer = LayerSpec::new(n_heads, n_kv_heads, head_dim);
                let spec = ModelSpec::uniform(0, hidden_size, MOST_TOKENS, n_layers, layer);
                let outline = ModelOutline::new(spec, WeightBytes::default());
                Subject::of_caches(self.name(), outline)
            }
            (None, None, Some(formula)) => Subject::of_formula(self.name(), formula.clone()),
            _ => {
                let rule = "must have one of config, layers and formula";
                return Err(Error::plan("preset", self.name(), rule));
            }
        };
        let notes = self.note.iter().cloned();
        let subject = subject.with_source(&self.source).with_notes(notes);
        let subject = Subject { parameters: self.parameters, frame: self.frame, ..subject };
        Ok(subject.on(device))
    }
}
