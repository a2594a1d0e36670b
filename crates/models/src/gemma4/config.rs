//! The configuration of Gemma 4. `file.rs` reads and writes it.

use std::path::Path;

use kv_cubecl::AttentionOptions;
use serde_json::{Map, Value};

use super::names;
use crate::{
    checkpoint::Weights,
    error::{Error, Result},
    family::ConfigJson,
    fields::{FULL, SLIDING, even, kv_heads, positive, sizes},
    gguf::{GgufNames, Metadata},
    nn::{Rope, RopeScaling},
    rope_config,
    spec::{LayerSpec, ModelSpec},
    stack::{DecoderConfig, SlidingConfig},
};

/// The configuration of a model, with all defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The fields that Gemma 3 has, too. Channels and key heads are those of layers with a sliding
    /// window.
    pub shared: SlidingConfig,
    /// Channels per head in layers that see all tokens.
    pub global_head_dim: usize,
    /// Key and value heads in layers that see all tokens.
    pub global_kv_heads: usize,
    /// The rope frequencies of layers that see all tokens.
    pub global_rope: RopeScaling,
    /// Base of the rope frequencies of layers with a sliding window.
    pub local_rope_theta: f64,
    /// True if values are the keys before norm and rope, in layers that see all tokens.
    pub keys_are_values: bool,
    /// The number of last layers that share the caches of earlier ones.
    pub shared_layers: usize,
    /// True if MLPs of layers that share a cache are twice as wide.
    pub double_wide: bool,
    /// Channels of a token's input to each layer; 0 without such inputs.
    pub per_layer_inputs: usize,
    /// The bound of the logits, if any.
    pub logit_softcap: Option<f64>,
}

impl Config {
    /// Returns whether layer `index` sees all tokens.
    pub fn is_global(&self, index: usize) -> bool {
        self.shared.full_layers.contains(&index)
    }

    /// Returns the layer whose cache layer `index` shares: the last one of its kind that has a
    /// cache. Returns `None` for a layer with a cache.
    pub fn owner(&self, index: usize) -> Option<usize> {
        let first = self.shared.n_layers.saturating_sub(self.shared_layers);
        let same_kind = |i: &usize| self.is_global(*i) == self.is_global(index);
        (index >= first).then(|| (0..first).rev().find(same_kind)).flatten()
    }

    /// Returns the channels per head of layer `index`.
    pub fn head_dim(&self, index: usize) -> usize {
        if self.is_global(index) { self.global_head_dim } else { self.shared.head_dim }
    }

    /// Returns the key and value heads of layer `index`.
    pub fn n_kv_heads(&self, index: usize) -> usize {
        if self.is_global(index) { self.global_kv_heads } else { self.shared.n_kv_heads }
    }

    /// Returns whether the values of layer `index` are its keys before norm and rope.
    pub fn keys_are_values(&self, index: usize) -> bool {
        self.keys_are_values && self.is_global(index)
    }

    /// Returns the width of the MLP of layer `index`.
    pub fn mlp_width(&self, index: usize) -> usize {
        let factor = if self.double_wide && self.owner(index).is_some() { 2 } else { 1 };
        factor * self.shared.intermediate_size
    }

    fn check_shared_layers(&self, path: &Path) -> Result<()> {
        let (n_layers, field) = (self.shared.n_layers, "num_kv_shared_layers");
        if self.shared_layers >= n_layers {
            let rule = format!(
                "must be below num_hidden_layers {n_layers}, because the first layers own the \
                 caches that the last ones share"
            );
            return Err(Error::config(path, field, self.shared_layers, rule));
        }
        let first = n_layers - self.shared_layers;
        if let Some(layer) = (first..n_layers).find(|&i| self.owner(i).is_none()) {
            let kind = if self.is_global(layer) { FULL } else { SLIDING };
            let rule = format!(
                "layer {layer} has {kind} and shares a cache, but none of the layers before \
                 {first} has {kind}; lower the number or change layer_types"
            );
            return Err(Error::config(path, field, self.shared_layers, rule));
        }
        Ok(())
    }
}

impl DecoderConfig for Config {
    const MODEL_TYPES: &'static [&'static str] = &["gemma4", "gemma4_text"];
    const GGUF: &'static [(&'static str, GgufNames)] = &[("gemma4", names::GGUF)];

    fn read(json: &ConfigJson<'_>, _: &mut Vec<String>) -> Result<Self> {
        Self::from_json(&ConfigJson { text: &json.text_fields()?, ..*json })
    }

    fn read_gguf(metadata: &Metadata<'_>, weights: &mut Weights) -> Result<Self> {
        Self::from_gguf(metadata, weights)
    }

    fn check(&self, path: &Path) -> Result<()> {
        let (n_heads, head_dim) = (self.shared.n_heads, self.global_head_dim);
        self.shared.check(path)?;
        let kv = ("num_global_key_value_heads", self.global_kv_heads);
        sizes(path, &[("global_head_dim", head_dim), kv])?;
        kv_heads(path, kv, n_heads)?;
        even(path, "global_head_dim", head_dim)?;
        rope_config::check(path, &self.global_rope, head_dim)?;
        positive(path, "rope_parameters.sliding_attention.rope_theta", self.local_rope_theta)?;
        sizes(path, &[("hidden_size_per_layer_input", self.per_layer_inputs.max(1))])?;
        positive(path, "final_logit_softcapping", self.logit_softcap.unwrap_or(1.0))?;
        self.check_shared_layers(path)
    }

    fn spec(&self) -> ModelSpec {
        let options = AttentionOptions::default().with_scale(1.0);
        let local = Rope::new(self.shared.head_dim, self.local_rope_theta, &RopeScaling::Default);
        let layer = self.shared.layer().with_options(options);
        let mut spec = self.shared.spec(layer, Some(local));
        spec.ropes[0] = Rope::new(self.global_head_dim, self.shared.rope_theta, &self.global_rope);
        for (i, layer) in spec.layers.iter_mut().enumerate() {
            if self.is_global(i) {
                let (n_heads, head_dim) = (self.shared.n_heads, self.global_head_dim);
                *layer = LayerSpec::new(n_heads, self.global_kv_heads, head_dim)
                    .with_options(options)
                    .with_key_bias(layer.key_bias)
                    .with_rope(layer.rope);
            }
            if let Some(owner) = self.owner(i) {
                *layer = layer.sharing_cache_of(owner);
            }
        }
        spec.with_per_layer_inputs(self.per_layer_inputs)
    }

    fn norm_epsilon(&self) -> f64 {
        self.shared.norm_epsilon
    }

    fn embedding_scale(&self) -> Option<f64> {
        Some((self.shared.hidden_size as f64).sqrt())
    }

    fn tied_head(&self) -> bool {
        self.shared.tied_head
    }

    fn logit_softcap(&self) -> Option<f64> {
        self.logit_softcap
    }

    fn to_json(&self, _: &Path) -> Result<Map<String, Value>> {
        Ok(self.fields())
    }
}
