//! The sizes of a model, layer by layer: caches, evaluation and training are built from them.

mod attend;
mod shared;

use kv_cubecl::{
    AttentionOptions, CacheFloat, CacheShape, KvCacheConfig, KvFormat, Sides,
    delta::DeltaConfig,
    sparse::{Compression, IndexConfig, RowFormat, SparseConfig},
};
use serde::{Deserialize, Serialize};

pub(crate) use attend::{heads, joined};

use crate::nn::Rope;

/// The attention of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct LayerSpec {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads. They divide `n_heads`.
    pub n_kv_heads: usize,
    /// Channels per head, of queries and keys, and of values.
    pub head_dim: Sides<usize>,
    /// Scale and softcap of the scores.
    pub options: AttentionOptions,
    /// Recent tokens that a query sees, including its own; `None` for all before it.
    pub sliding_window: Option<usize>,
    /// Index in [`ModelSpec::ropes`]; `None` for a layer without rope.
    pub rope: Option<usize>,
    /// True if the projection of keys has a bias, as in Qwen2. It can be far larger than the rest
    /// of a key, which matters to how keys are quantized.
    pub key_bias: bool,
    /// Sparse attention to one row per token and to compressed entries; `None` for keys and values.
    pub sparse: Option<SparseLayer>,
    /// A recurrent state instead of a cache; `None` for a layer of attention.
    pub delta: Option<DeltaConfig>,
    /// In latent attention, the channels of a head's keys and values before compression. They are
    /// never computed: the cache stores one row per token, whose first channels are the value.
    /// `None` for other layers.
    pub latent: Option<Sides<usize>>,
    /// The earlier layer whose keys and values this layer attends to, in place of a cache of its
    /// own; `None` for a layer with keys and values.
    pub shared: Option<usize>,
}

/// The attention of a layer, in a model that has layers of both kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum AttentionKind {
    /// Attends to all tokens.
    Global,
    /// Attends to a sliding window of tokens.
    Sliding,
}

/// The sparse attention of a layer besides its sliding window (DeepSeek-V4, 2026).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SparseLayer {
    /// The compressed entries; `None` for a layer with a sliding window only.
    pub entries: Option<SharedEntries>,
    /// The selection among entries; `None` for a layer that attends to all of them.
    pub selection: Option<SharedSelection>,
}

/// The compressed entries that a layer attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedEntries {
    /// The layer that computes them: the layer itself or an earlier one.
    pub owner: usize,
    /// The tokens that an entry stands for.
    pub compression: Compression,
}

/// The entries that an indexer selects for a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedSelection {
    /// The layer whose indexer selects them: the layer itself or an earlier one.
    pub owner: usize,
    /// Heads of the indexer.
    pub n_heads: usize,
    /// Channels of the indexer's keys.
    pub head_dim: usize,
    /// Entries that a token attends to.
    pub top_k: usize,
}

impl SparseLayer {
    /// Describes a layer with a sliding window only.
    pub const fn window() -> Self {
        Self { entries: None, selection: None }
    }

    /// Describes a layer that attends to all of these entries.
    pub const fn all(entries: SharedEntries) -> Self {
        Self { entries: Some(entries), selection: None }
    }

    /// Describes a layer that attends to a selection of these entries.
    pub const fn selected(entries: SharedEntries, selection: SharedSelection) -> Self {
        Self { entries: Some(entries), selection: Some(selection) }
    }
}

impl LayerSpec {
    /// Describes a layer of full attention without rope, with scores scaled by `1 /
    /// sqrt(head_dim)`. `head_dim` is one number, or a number for keys and one for values.
    pub fn new(n_heads: usize, n_kv_heads: usize, head_dim: impl Into<Sides<usize>>) -> Self {
        let (head_dim, options) = (head_dim.into(), AttentionOptions::default());
        Self {
            n_heads,
            n_kv_heads,
            head_dim,
            options,
            sliding_window: None,
            rope: None,
            key_bias: false,
            sparse: None,
            delta: None,
            latent: None,
            shared: None,
        }
    }

    /// Describes a layer of latent attention (DeepSeek-V2, 2024,
    /// <https://arxiv.org/abs/2405.04434>) whose queries are multiplied into the latent space. All
    /// heads attend to one row per token: the latent row of `rank` channels, which is the value,
    /// then a key of `rotary_dim` channels after rope. `of_heads` are the channels that keys and
    /// values of a head would have.
    pub fn latent(n_heads: usize, rank: usize, rotary_dim: usize, of_heads: Sides<usize>) -> Self {
        let head_dim = Sides { keys: rank + rotary_dim, values: rank };
        Self { latent: Some(of_heads), ..Self::new(n_heads, 1, head_dim) }
    }

    /// Returns whether the layer has a cache that stores values besides keys.
    pub const fn stores_values(&self) -> bool {
        self.has_cache() && !self.shares_values()
    }

    /// Returns whether a value is the first channels of its key, so that the cache stores keys
    /// only.
    pub const fn shares_values(&self) -> bool {
        self.latent.is_some()
    }

    /// Returns the same layer with other options.
    #[must_use]
    pub fn with_options(self, options: AttentionOptions) -> Self {
        Self { options, ..self }
    }

    /// Returns the same layer with a sliding window of this many tokens, or without one.
    #[must_use]
    pub fn with_sliding_window(self, sliding_window: Option<usize>) -> Self {
        Self { sliding_window, ..self }
    }

    /// Returns the same layer with the rope at this index in [`ModelSpec::ropes`], or without one.
    #[must_use]
    pub fn with_rope(self, rope: Option<usize>) -> Self {
        Self { rope, ..self }
    }

    /// Returns the same layer with a bias in the projection of keys, or without one.
    #[must_use]
    pub fn with_key_bias(self, key_bias: bool) -> Self {
        Self { key_bias, ..self }
    }

    /// Returns the same layer with sparse attention. It must have a sliding window, too.
    #[must_use]
    pub fn with_sparse(self, sparse: SparseLayer) -> Self {
        Self { sparse: Some(sparse), ..self }
    }

    /// Describes a layer of the gated delta rule, which has a state of this kind and no cache.
    pub fn recurrent(delta: DeltaConfig) -> Self {
        let layer = Self::new(delta.n_value_heads, delta.n_key_heads, delta.head_dim);
        Self { delta: Some(delta), ..layer }
    }

    /// Returns the same layer without keys and values, which attends to those of layer `owner`.
    /// [`ModelSpec::check_shared`] has the rules.
    #[must_use]
    pub fn sharing_cache_of(self, owner: usize) -> Self {
        Self { shared: Some(owner), ..self }
    }

    /// Returns whether the layer has a cache of its own, which a policy describes.
    pub const fn has_cache(&self) -> bool {
        self.delta.is_none() && self.shared.is_none()
    }

    /// Returns the state of a recurrent layer for the capacity and the float type of `config`;
    /// `None` for a layer with a cache. A state in f16 could overflow, so f16 means f32 here. A
    /// state in bf16 is rounded after each call, so it depends slightly on how a text is divided
    /// into calls.
    pub fn delta_config(&self, config: &KvCacheConfig) -> Option<DeltaConfig> {
        let float = match config.float {
            CacheFloat::Bf16 => CacheFloat::Bf16,
            _ => CacheFloat::F32,
        };
        Some(self.delta?.with_capacity(config.capacity).with_float(float))
    }

    /// Returns what a layer of sparse attention keeps, for the capacity, the sliding window and the
    /// formats of `config`; `None` for a layer with keys and values. Entries have the format of
    /// values, and the keys of the indexer have the format of keys.
    pub fn sparse_config(&self, config: &KvCacheConfig) -> Option<SparseConfig> {
        let SparseLayer { entries, selection } = self.sparse?;
        let window = config.sliding_window.unwrap_or(config.capacity);
        let row = |codes: KvFormat| match codes.is_quantized() {
            true => RowFormat::codes(codes),
            false => RowFormat::float(config.float),
        };
        let sparse = SparseConfig::new(self.head_dim.keys, window)
            .with_capacity(config.capacity)
            .with_formats(config.float, row(config.values));
        let sparse = entries.map_or(sparse, |entries| sparse.with_compression(entries.compression));
        let keys = row(config.keys);
        Some(selection.map_or(sparse, |SharedSelection { head_dim, top_k, .. }| {
            sparse.with_index(IndexConfig { head_dim, top_k, keys })
        }))
    }

    /// Returns the shape of the layer's cache for `batch` sequences.
    pub fn cache_shape(&self, batch: usize) -> CacheShape {
        let Self { n_kv_heads, head_dim, .. } = *self;
        let shape = CacheShape::new(batch, n_kv_heads, head_dim);
        if self.shares_values() { shape.with_shared_values() } else { shape }
    }

    /// Returns the rows of a fused QKV projection: query heads, key heads, value heads; in a
    /// recurrent layer also the gates of the output. A layer that shares a cache has queries only.
    pub fn qkv_rows(&self) -> usize {
        if let Some(delta) = self.delta {
            return delta.conv_channels() + delta.value_channels();
        }
        if self.shared.is_some() {
            return self.n_heads * self.head_dim.keys;
        }
        (self.n_heads + self.n_kv_heads) * self.head_dim.keys
            + self.n_kv_heads * self.head_dim.values
    }
}

/// The sizes of a decoder-only model, for caches, evaluation and training.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ModelSpec {
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// The longest context, in tokens.
    pub max_positions: usize,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// The ropes of queries and keys; each layer has one or none.
    pub ropes: Vec<Rope>,
    /// Channels of a token's input to each layer beside the residual stream; 0 without such inputs.
    pub per_layer_inputs: usize,
}

impl ModelSpec {
    /// Describes a model of `n_layers` equal layers without rope.
    pub fn uniform(
        vocab_size: usize,
        hidden_size: usize,
        max_positions: usize,
        n_layers: usize,
        layer: LayerSpec,
    ) -> Self {
        Self::new(vocab_size, hidden_size, max_positions, vec![layer; n_layers])
    }

    /// Describes a model of these layers. [`with_ropes`](Self::with_ropes) adds the ropes that they
    /// refer to.
    pub fn new(
        vocab_size: usize,
        hidden_size: usize,
        max_positions: usize,
        layers: Vec<LayerSpec>,
    ) -> Self {
        Self { vocab_size, hidden_size, max_positions, layers, ropes: vec![], per_layer_inputs: 0 }
    }

    /// Returns the attention of layer `index`; `None` for a layer without a cache of its own, and
    /// if all layers with one are of one kind.
    ///
    /// # Panics
    /// Panics when the model has no such layer.
    pub fn attention_kind(&self, index: usize) -> Option<AttentionKind> {
        if !self.layers[index].has_cache() {
            return None;
        }
        let slides = |layer: &LayerSpec| layer.sliding_window.is_some();
        let slides_here = slides(&self.layers[index]);
        let mut attending = self.layers.iter().filter(|layer| layer.has_cache());
        let mixed = attending.any(|layer| slides(layer) != slides_here);
        mixed.then_some(match slides_here {
            true => AttentionKind::Sliding,
            false => AttentionKind::Global,
        })
    }

    /// Describes a model of layer `index` only; `None` if the layer attends to entries or to the
    /// cache of another.
    ///
    /// # Panics
    /// Panics when the model has no such layer.
    pub fn only(&self, index: usize) -> Option<Self> {
        let mut layer = self.layers[index];
        if layer.shared.is_some() {
            return None;
        }
        if let Some(sparse) = &mut layer.sparse {
            let entries = sparse.entries.as_mut().map(|entries| &mut entries.owner);
            let selection = sparse.selection.as_mut().map(|selection| &mut selection.owner);
            for owner in entries.into_iter().chain(selection) {
                if *owner != index {
                    return None;
                }
                *owner = 0;
            }
        }
        Some(Self { layers: vec![layer], ..self.clone() })
    }

    /// Returns the same model with this rope in all layers.
    #[must_use]
    pub fn with_rope(self, rope: Rope) -> Self {
        let layers = self.layers.iter().map(|layer| layer.with_rope(Some(0))).collect();
        Self { ropes: vec![rope], layers, ..self }
    }

    /// Returns the same model whose layers get inputs of this many channels per token.
    #[must_use]
    pub fn with_per_layer_inputs(self, per_layer_inputs: usize) -> Self {
        Self { per_layer_inputs, ..self }
    }

    /// Returns the same model with the ropes that its layers refer to.
    #[must_use]
    pub fn with_ropes(self, ropes: Vec<Rope>) -> Self {
        Self { ropes, ..self }
    }
}

impl AsRef<Self> for ModelSpec {
    fn as_ref(&self) -> &Self {
        self
    }
}
