//! The KV caches of all layers of a model.

mod prompt;
mod saved;
mod slots;

use burn::tensor::Device;
use kv_cubecl::{KvCache, MemoryBytes, RopeTable};

pub use self::{
    prompt::{Checkpoints, PromptCache},
    saved::{SavedAs, SavedCache},
};
use crate::{Error, LayerSpec, ModelCacheConfig, ModelSpec, Result, nn::Rope};

/// One [`KvCache`] per layer; all of them hold the same tokens.
///
/// The sequences of its batch may have different lengths: [`step_ragged`](crate::LanguageModel::step_ragged)
/// appends to each its own number of tokens, and [`remove`](Self::remove), [`admit`](Self::admit) and
/// [`fork`](Self::fork) change which there are.
#[derive(Clone, Debug)]
pub struct ModelCache {
    pub(crate) layers: Vec<KvCache>,
    /// The rotary tables of all positions below `room()`, and the [`Rope`]s they were computed by.
    rope_tables: Vec<(Rope, RopeTable)>,
    batch: usize,
    capacity: usize,
    max_positions: usize,
}

/// Allocated bytes of a [`ModelCache`].
#[derive(Clone, Debug)]
pub struct ModelCacheBytes {
    /// One entry per layer: the bytes of each part of its cache.
    pub layers: Vec<MemoryBytes>,
}

impl ModelCacheBytes {
    /// Bytes of all parts of all layers.
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
            let cache = KvCache::new(&config.layer(spec, i), layer.cache_shape(batch), device)?;
            Ok(cache.with_options(layer.options)?)
        };
        let layers = spec.layers.iter().enumerate().map(new).collect::<Result<Vec<_>>>()?;
        let device = device.clone().without_autodiff();
        Ok(Self::of_layers(layers, config, spec, batch, &device))
    }

    /// The caches of all layers, made for `config`, with their rotary tables.
    fn of_layers(
        layers: Vec<KvCache>,
        config: &ModelCacheConfig,
        spec: &ModelSpec,
        batch: usize,
        device: &Device,
    ) -> Self {
        let (capacity, max_positions) = (config.capacity, spec.max_positions);
        let room = capacity.min(max_positions);
        let tabulate = |rope: &Rope| (rope.clone(), rope.table(0, room, room, device));
        let rope_tables = spec.ropes.iter().map(tabulate).collect();
        Self { layers, rope_tables, batch, capacity, max_positions }
    }

    /// The rotary table that was computed by `rope`, if it lies on `device`; `None` on a device that
    /// records gradients.
    pub(crate) fn rope_table(&self, rope: &Rope, device: &Device) -> Option<&RopeTable> {
        let (_, table) = self.rope_tables.iter().find(|(owner, _)| owner == rope)?;
        (table.table().device() == *device && !device.is_autodiff()).then_some(table)
    }

    /// Tokens in the cache, of the longest sequence.
    pub fn len(&self) -> usize {
        self.layers.first().map_or(0, KvCache::len)
    }

    /// Tokens of each sequence.
    pub fn lens(&self) -> &[usize] {
        self.layers.first().map_or(&[], KvCache::lens)
    }

    /// Whether all sequences hold the same number of tokens.
    pub(crate) fn is_even(&self) -> bool {
        self.lens().iter().all(|&len| len == self.len())
    }

    /// Whether no token was appended since construction or [`reset`](Self::reset).
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens that the layers have room for.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Tokens that the layers have room for and the model has positions for.
    pub(crate) fn room(&self) -> usize {
        self.capacity.min(self.max_positions)
    }

    /// Sequences in the batch.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Tokens that may still be appended to every sequence: the cache's capacity or the model's limit,
    /// whichever comes first.
    pub fn remaining(&self) -> usize {
        self.room().saturating_sub(self.len())
    }

    /// Moves the layers and the rotary tables out, and leaves a cache without them.
    pub(crate) fn take(&mut self) -> Self {
        let (layers, rope_tables) =
            (std::mem::take(&mut self.layers), std::mem::take(&mut self.rope_tables));
        Self { layers, rope_tables, ..*self }
    }

    /// Adds `tokens` to the length of every layer, for tokens that [`KvCache::attend_at`] appended
    /// on the device without the host's knowing. The caller has checked that they fit.
    pub(crate) fn advance(&mut self, tokens: usize) -> Result<()> {
        for layer in &mut self.layers {
            layer.advance(tokens)?;
        }
        Ok(())
    }

    /// Forgets all tokens and keeps the allocations.
    pub fn reset(&mut self) {
        for layer in &mut self.layers {
            layer.reset();
        }
    }

    /// Allocated bytes, by layer and part.
    pub fn memory_bytes(&self) -> ModelCacheBytes {
        ModelCacheBytes { layers: self.layers.iter().map(|layer| layer.memory_bytes()).collect() }
    }

    /// Counts from now on how many bytes of quantized keys and values become floats again, in every layer:
    /// [`KvCache::restored_bytes`].
    pub fn count_restored(&mut self) {
        self.layers.iter_mut().for_each(KvCache::count_restored);
    }

    /// The caches by layer, first layer first.
    pub fn layers(&self) -> &[KvCache] {
        &self.layers
    }

    /// The tokens by which each sequence grows in a pass of ids `[batch, seq]`, after a check that they fit.
    pub(crate) fn tokens_of(&self, [batch, seq]: [usize; 2]) -> Result<Vec<usize>> {
        self.check(batch, seq)?;
        Ok(vec![seq; batch])
    }

    /// Checks that `added` more tokens of each of `batch` sequences fit, before any layer changes.
    pub(crate) fn check(&self, batch: usize, added: usize) -> Result<()> {
        if batch != self.batch {
            let rule = format!("the cache was made for batch {}", self.batch);
            return Err(Error::argument("batch", batch, rule));
        }
        check_context(self.len(), added, "max_positions", self.max_positions)?;
        check_context(self.len(), added, "capacity", self.capacity)
    }
}

pub(crate) fn check_context(
    cached: usize,
    added: usize,
    limit_name: &'static str,
    limit: usize,
) -> Result<()> {
    if added == 0 {
        return Err(Error::argument("seq", 0, "a pass needs at least one token"));
    }
    let requested = cached.saturating_add(added);
    if requested > limit {
        return Err(Error::ContextLength { requested, cached, added, limit_name, limit });
    }
    Ok(())
}
