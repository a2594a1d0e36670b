//! The KV caches of all layers of a model.

mod layer;
mod prefix;
mod prompt;
mod saved;
mod slots;

use std::sync::Arc;

use burn::tensor::Device;
use kv_cubecl::{MemoryBytes, RopeTable};

pub(crate) use self::layer::{LayerConfig, LayerPlan};
pub use self::{
    layer::LayerCache,
    prefix::{PrefixCache, PrefixStats},
    prompt::{Checkpoints, PromptCache},
    saved::{SavedAs, SavedCache},
};
use crate::{
    cache_config::ModelCacheConfig,
    error::{Error, Result},
    nn::Rope,
    spec::{LayerSpec, ModelSpec},
};

/// One [`LayerCache`] for each layer that has one of its own; all of them hold the same tokens.
///
/// Sequences of a batch may have different lengths.
/// [`step_ragged`](crate::LanguageModel::step_ragged) appends a different number of tokens to each.
/// [`remove`](Self::remove), [`admit`](Self::admit) and [`fork`](Self::fork) empty and fill slots.
#[derive(Clone, Debug)]
pub struct ModelCache {
    /// The caches of the layers that own one.
    pub(crate) layers: Vec<LayerCache>,
    /// The index in `layers` of every layer of the model. Layers that share a cache have the same.
    places: Arc<[usize]>,
    /// The rope tables of all positions below `room()`, with the [`Rope`] of each.
    rope_tables: Vec<(Rope, RopeTable)>,
    batch: usize,
    capacity: usize,
    max_positions: usize,
}

/// Allocated bytes of a [`ModelCache`].
#[derive(Clone, Debug)]
pub struct ModelCacheBytes {
    /// The bytes of each part of a layer's cache, one entry per layer; 0 for a layer that shares
    /// the cache of another.
    pub layers: Vec<MemoryBytes>,
}

impl ModelCacheBytes {
    /// Returns the bytes of all parts of all layers.
    pub fn total(&self) -> usize {
        self.layers.iter().map(|layer| layer.total()).sum()
    }
}

impl ModelCache {
    pub(crate) fn new(
        config: &ModelCacheConfig,
        spec: &ModelSpec,
        batch: usize,
        device: &Device,
    ) -> Result<Self> {
        let new = |(i, layer): (usize, &LayerSpec)| {
            LayerPlan::new(layer, &config.layer(spec, i), batch).allocate(device)
        };
        let layers = spec.owners().map(new).collect::<Result<Vec<_>>>()?;
        let device = device.clone().without_autodiff();
        Ok(Self::of_layers(layers, config, spec, batch, &device))
    }

    /// Joins the caches of all layers that own one, made for `config`, with their rope tables.
    fn of_layers(
        layers: Vec<LayerCache>,
        config: &ModelCacheConfig,
        spec: &ModelSpec,
        batch: usize,
        device: &Device,
    ) -> Self {
        let (capacity, max_positions) = (config.capacity, spec.max_positions);
        let room = capacity.min(max_positions);
        let tabulate = |rope: &Rope| (rope.clone(), rope.table(0, room, room, device));
        let rope_tables = spec.ropes.iter().map(tabulate).collect();
        Self { layers, places: spec.cache_places(), rope_tables, batch, capacity, max_positions }
    }

    /// Returns the table of `rope` if it is on `device`. Returns `None` on a device with autodiff,
    /// where tables are computed again.
    pub(crate) fn rope_table(&self, rope: &Rope, device: &Device) -> Option<&RopeTable> {
        let (_, table) = self.rope_tables.iter().find(|(owner, _)| owner == rope)?;
        (table.table().device() == *device && !device.is_autodiff()).then_some(table)
    }

    /// Returns the number of tokens of the longest sequence.
    pub fn len(&self) -> usize {
        self.layers.first().map_or(0, LayerCache::len)
    }

    /// Returns the number of tokens of each sequence.
    pub fn lens(&self) -> &[usize] {
        self.layers.first().map_or(&[], LayerCache::lens)
    }

    /// Returns whether all sequences have the same length.
    pub(crate) fn is_even(&self) -> bool {
        self.lens().iter().all(|&len| len == self.len())
    }

    /// Returns whether all sequences have the same length, and still do after these numbers of
    /// tokens.
    pub(crate) fn is_even_with(&self, tokens: &[usize]) -> bool {
        self.is_even() && tokens.windows(2).all(|pair| pair[0] == pair[1])
    }

    /// Returns whether a pass can attend to this cache without appending its tokens, as
    /// [`LanguageModel::draft`](crate::LanguageModel::draft) does: whether all layers have keys and
    /// values.
    pub fn takes_drafts(&self) -> bool {
        self.layers.iter().all(|layer| matches!(layer, LayerCache::Kv(_)))
    }

    /// Returns whether the cache holds no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of tokens that the layers are allocated for.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the most tokens of a sequence: the capacity, or the model's limit if that is less.
    pub(crate) fn room(&self) -> usize {
        self.capacity.min(self.max_positions)
    }

    /// Returns the number of sequences.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Returns how many tokens can still be appended to every sequence.
    pub fn remaining(&self) -> usize {
        self.room().saturating_sub(self.len())
    }

    /// Moves layers and rope tables out and leaves a cache without them.
    pub(crate) fn take(&mut self) -> Self {
        let (layers, rope_tables) =
            (std::mem::take(&mut self.layers), std::mem::take(&mut self.rope_tables));
        Self { layers, rope_tables, places: self.places.clone(), ..*self }
    }

    /// Adds `tokens` to the host's length of every layer, after a step at a position on the
    /// device appended them there. The caller has checked that they fit.
    pub(crate) fn advance(&mut self, tokens: usize) -> Result<()> {
        for layer in &mut self.layers {
            layer.advance(tokens)?;
        }
        Ok(())
    }

    /// Removes all tokens and keeps the allocations.
    pub fn reset(&mut self) {
        for layer in &mut self.layers {
            layer.reset();
        }
    }

    /// Returns the allocated bytes by layer and part.
    pub fn memory_bytes(&self) -> ModelCacheBytes {
        let bytes = |(layer, &place): (usize, &usize)| match self.is_owner(layer) {
            true => self.layers[place].memory_bytes(),
            false => MemoryBytes::default(),
        };
        ModelCacheBytes { layers: self.places.iter().enumerate().map(bytes).collect() }
    }

    /// Returns the bytes that a decode step reads of each sequence's `context` tokens, in all
    /// layers. A cache is read once by each layer that shares it.
    pub fn bytes_read(&self, context: usize) -> usize {
        self.places.iter().map(|&place| self.layers[place].bytes_read(context)).sum()
    }

    /// Returns whether layer `index` has a cache of its own.
    fn is_owner(&self, index: usize) -> bool {
        !self.places[..index].contains(&self.places[index])
    }

    /// Returns the cache that layer `index` of the model attends to: its own, or that of the layer
    /// it shares one with.
    ///
    /// # Panics
    /// Panics when the model has no such layer.
    pub fn layer(&self, index: usize) -> &LayerCache {
        &self.layers[self.places[index]]
    }

    /// Computes [`layer`](Self::layer) for a write.
    pub(crate) fn layer_mut(&mut self, index: usize) -> &mut LayerCache {
        &mut self.layers[self.places[index]]
    }

    /// Starts counting the bytes of quantized keys and values that are converted back to floats, in
    /// every layer; see [`KvCache::restored_bytes`](kv_cubecl::KvCache::restored_bytes).
    pub fn count_restored(&mut self) {
        self.layers.iter_mut().for_each(LayerCache::count_restored);
    }

    /// Returns the caches of the layers that own one, first to last.
    pub fn layers(&self) -> &[LayerCache] {
        &self.layers
    }

    /// Checks that the ids `[batch, seq]` of a forward pass fit, and returns how many tokens each
    /// sequence grows by.
    pub(crate) fn tokens_of(&self, [batch, seq]: [usize; 2]) -> Result<Vec<usize>> {
        self.check(batch, seq)?;
        Ok(vec![seq; batch])
    }

    /// Checks that `added` more tokens fit into each of `batch` sequences, before any layer
    /// changes.
    pub(crate) fn check(&self, batch: usize, added: usize) -> Result<()> {
        if batch != self.batch {
            let rule = format!("the cache was made for batch {}", self.batch);
            return Err(Error::argument("batch", batch, rule));
        }
        self.check_after(self.len(), added)
    }

    /// Checks that `added` tokens fit into a sequence of `cached` tokens.
    pub(crate) fn check_after(&self, cached: usize, added: usize) -> Result<()> {
        check_context(cached, added, "max_positions", self.max_positions)?;
        check_context(cached, added, "capacity", self.capacity)
    }
}

pub(crate) fn check_context(
    cached: usize,
    added: usize,
    limit_name: &'static str,
    limit: usize,
) -> Result<()> {
    if added == 0 {
        return Err(Error::argument("seq", 0, "must be at least 1"));
    }
    let requested = cached.saturating_add(added);
    if requested > limit {
        return Err(Error::ContextLength { requested, cached, added, limit_name, limit });
    }
    Ok(())
}
