//! [`LayerCache`]: the cache of one layer, of whatever kind, and how it is saved.

mod kv;
mod part;
mod sparse;

use burn::tensor::{Device, TensorData};
use kv_cubecl::{
    AttentionOptions, CacheShape, KvCache, KvCacheConfig, MemoryBytes,
    layout::CacheLayout,
    sparse::{SparseCache, SparseConfig},
};
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

pub(super) use self::part::{Part, PartName};
use crate::{
    error::{Error, Result},
    spec::LayerSpec,
};

/// The cache of one layer of a model.
#[derive(Clone, Debug)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant, reason = "most models have layers of one kind")]
pub enum LayerCache {
    /// Keys and values.
    Kv(KvCache),
    /// Recent tokens and compressed entries, for sparse attention.
    Sparse(SparseCache),
}

/// Evaluates an expression for the cache of any kind.
macro_rules! each {
    ($layer:expr, $cache:ident => $result:expr) => {
        match $layer {
            LayerCache::Kv($cache) => $result,
            LayerCache::Sparse($cache) => $result,
        }
    };
}

impl LayerCache {
    /// Returns the keys and values; `None` for a layer that keeps something else.
    pub fn kv(&self) -> Option<&KvCache> {
        match self {
            Self::Kv(cache) => Some(cache),
            Self::Sparse(_) => None,
        }
    }

    /// Returns the recent tokens and entries of a layer with sparse attention; `None` for another
    /// layer.
    pub fn sparse(&self) -> Option<&SparseCache> {
        match self {
            Self::Sparse(cache) => Some(cache),
            Self::Kv(_) => None,
        }
    }

    /// Returns the number of tokens of the longest sequence.
    pub fn len(&self) -> usize {
        each!(self, cache => cache.len())
    }

    /// Returns whether the cache holds no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of tokens of each sequence.
    pub fn lens(&self) -> &[usize] {
        each!(self, cache => cache.lens())
    }

    /// Returns the device of the cache.
    pub fn device(&self) -> Device {
        each!(self, cache => cache.device())
    }

    /// Returns the allocated bytes, by part. A layer with sparse attention counts compressed
    /// entries as values, the keys of its indexer as keys, and everything else as floats.
    pub fn memory_bytes(&self) -> MemoryBytes {
        match self {
            Self::Kv(cache) => cache.memory_bytes(),
            Self::Sparse(cache) => sparse::memory_bytes(cache.memory_bytes()),
        }
    }

    /// Returns the bytes that a decode step reads of each sequence's `context` tokens, over all
    /// sequences.
    pub fn bytes_read(&self, context: usize) -> usize {
        match self {
            Self::Kv(cache) => cache.layout().bytes_read(context),
            Self::Sparse(cache) => sparse::bytes_read(cache.config(), cache.lens().len(), context),
        }
    }

    pub(super) fn reset(&mut self) {
        each!(self, cache => cache.reset());
    }

    pub(super) fn count_restored(&mut self) {
        match self {
            Self::Kv(cache) => cache.count_restored(),
            // Sparse attention reads codes in place.
            Self::Sparse(_) => {}
        }
    }

    pub(super) fn select(&self, sequences: &[usize]) -> Result<Self> {
        Ok(match self {
            Self::Kv(cache) => Self::Kv(cache.select(sequences)?),
            Self::Sparse(cache) => Self::Sparse(cache.select(sequences)?),
        })
    }

    pub(super) fn join<'a>(caches: impl Iterator<Item = &'a Self> + Clone) -> Result<Self> {
        let kv: Option<Vec<_>> = caches.clone().map(|cache| cache.kv().cloned()).collect();
        if let Some(kv) = kv {
            return Ok(Self::Kv(KvCache::join(&kv)?));
        }
        let sparse: Option<Vec<_>> = caches.map(|cache| cache.sparse().cloned()).collect();
        match sparse {
            Some(sparse) => Ok(Self::Sparse(SparseCache::join(&sparse)?)),
            None => Err(other_kind("join")),
        }
    }

    pub(super) fn remove(&mut self, sequence: usize) -> Result<()> {
        Ok(each!(self, cache => cache.remove(sequence))?)
    }

    pub(super) fn admit(&mut self, sequence: usize, other: &Self) -> Result<()> {
        match (self, other) {
            (Self::Kv(cache), Self::Kv(other)) => Ok(cache.admit(sequence, other)?),
            (Self::Sparse(cache), Self::Sparse(other)) => Ok(cache.admit(sequence, other)?),
            _ => Err(other_kind("admit")),
        }
    }

    pub(super) fn fork(&mut self, from: usize, to: usize) -> Result<()> {
        Ok(each!(self, cache => cache.fork(from, to))?)
    }

    pub(super) fn advance(&mut self, tokens: usize) -> Result<()> {
        Ok(each!(self, cache => cache.advance(tokens))?)
    }

    pub(super) fn truncate(&mut self, sequence: usize, len: usize) -> Result<()> {
        Ok(each!(self, cache => cache.truncate(sequence, len))?)
    }

    /// Returns whether [`truncate`](Self::truncate) refuses `len` because it is too short.
    pub(super) fn refuses(&self, sequence: usize, len: usize) -> bool {
        let lost = self.shortest(sequence).is_ok_and(|shortest| len < shortest);
        match self {
            Self::Kv(_) => lost,
            Self::Sparse(_) => lost && len > 0,
        }
    }

    /// Returns the fewest tokens that a sequence can be cut back to.
    ///
    /// # Errors
    /// Fails for a sequence that the batch does not have.
    pub fn shortest(&self, sequence: usize) -> Result<usize> {
        Ok(each!(self, cache => cache.shortest(sequence))?)
    }

    /// Returns the largest number of tokens up to `len` that a sequence can be cut back to, so that
    /// the cache equals one that never held the others.
    ///
    /// # Errors
    /// Fails for a sequence that the batch does not have, and for a `len` above its tokens.
    pub fn exact(&self, sequence: usize, len: usize) -> Result<usize> {
        Ok(each!(self, cache => cache.exact(sequence, len))?)
    }

    /// Cuts a sequence back to a number of tokens that [`exact`](Self::exact) returned.
    pub(super) fn cut_back(&mut self, sequence: usize, len: usize) -> Result<()> {
        match self {
            Self::Kv(cache) => cache.cut_back(sequence, len).map(|_| ())?,
            Self::Sparse(cache) => cache.truncate(sequence, len)?,
        }
        Ok(())
    }

    pub(super) fn resized(&self, capacity: usize) -> Result<Self> {
        Ok(match self {
            Self::Kv(cache) => Self::Kv(cache.resized(capacity)?),
            Self::Sparse(cache) => Self::Sparse(cache.resized(capacity)?),
        })
    }

    /// Returns whether the cache was made for such a layer, in any format.
    pub(super) fn fits(&self, layer: &LayerSpec, batch: usize) -> bool {
        match self {
            Self::Kv(cache) => {
                layer.sparse.is_none() && cache.layout().shape() == layer.cache_shape(batch)
            }
            Self::Sparse(cache) => {
                let float = KvCacheConfig::float().with_sliding_window(layer.sliding_window);
                let asked = layer.sparse_config(&float);
                let sizes = |config: &SparseConfig| {
                    let index = config.index.map(|index| (index.head_dim, index.top_k));
                    (config.head_dim, config.compression, index)
                };
                cache.lens().len() == batch
                    && asked.is_some_and(|asked| sizes(&asked) == sizes(cache.config()))
            }
        }
    }

    /// Returns the layout of the cache.
    pub(super) fn plan(&self) -> LayerPlan {
        match self {
            Self::Kv(cache) => LayerPlan {
                config: LayerConfig::Kv(*cache.layout().config()),
                shape: cache.layout().shape(),
                options: cache.options(),
            },
            Self::Sparse(cache) => LayerPlan {
                config: LayerConfig::Sparse(*cache.config()),
                shape: CacheShape::new(cache.lens().len(), 1, cache.config().head_dim),
                options: AttentionOptions::default(),
            },
        }
    }

    /// Reads the tensors of the cache, which [`LayerPlan::parts`] lists.
    pub(super) fn into_data(self) -> Result<Vec<TensorData>> {
        match self {
            Self::Kv(cache) => kv::into_data(cache),
            Self::Sparse(cache) => sparse::into_data(&cache),
        }
    }

    /// Reads what the cache loses as it grows, which [`LayerPlan::kept`] lists for its length.
    pub(super) fn checkpoint(&self) -> Result<Vec<TensorData>> {
        match self {
            Self::Kv(cache) => kv::checkpoint(cache),
            Self::Sparse(cache) => sparse::checkpoint(cache),
        }
    }

    /// Returns this cache of one sequence, cut back to the `len` tokens that it had when
    /// [`checkpoint`](Self::checkpoint) returned `kept`.
    pub(super) fn at_checkpoint(&self, len: usize, kept: &[TensorData]) -> Result<Self> {
        match self {
            Self::Kv(cache) => Ok(Self::Kv(kv::at_checkpoint(cache, len, kept)?)),
            Self::Sparse(cache) => Ok(Self::Sparse(sparse::at_checkpoint(cache, len, kept)?)),
        }
    }
}

fn other_kind(op: &str) -> Error {
    Error::unsupported(format!("{op}: a cache of another kind"), "layers must have equal kinds")
}

/// The kind and the formats of a layer's cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum LayerConfig {
    Kv(KvCacheConfig),
    Sparse(SparseConfig),
}

/// A layer's cache before it is allocated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LayerPlan {
    pub(crate) config: LayerConfig,
    shape: CacheShape,
    options: AttentionOptions,
}

impl LayerConfig {
    /// Returns the configuration of the cache of `layer`, for which a policy asks `config`.
    pub(crate) fn new(layer: &LayerSpec, config: &KvCacheConfig) -> Self {
        match layer.sparse_config(config) {
            Some(sparse) => Self::Sparse(sparse),
            None => Self::Kv(*config),
        }
    }

    pub(super) fn capacity(&self) -> usize {
        match self {
            Self::Kv(config) => config.capacity,
            Self::Sparse(config) => config.capacity,
        }
    }

    #[must_use]
    pub(super) fn with_capacity(self, capacity: usize) -> Self {
        match self {
            Self::Kv(config) => Self::Kv(config.with_capacity(capacity)),
            Self::Sparse(config) => Self::Sparse(config.with_capacity(capacity)),
        }
    }

    /// Returns the names of all tensors of a cache.
    ///
    /// # Errors
    /// Fails for a configuration that breaks a rule. Files may contain any.
    pub(super) fn names(&self) -> Result<Vec<PartName>> {
        match self {
            Self::Kv(_) => Ok(kv::PARTS.to_vec()),
            Self::Sparse(config) => sparse::names(config, |_| true),
        }
    }

    /// Returns the names of the tensors of a checkpoint.
    ///
    /// # Errors
    /// Fails as [`names`](Self::names) does.
    pub(super) fn kept_names(&self) -> Result<Vec<PartName>> {
        match self {
            Self::Kv(config) => Ok(kv::kept_names(config).to_vec()),
            Self::Sparse(config) => sparse::names(config, |recent| recent),
        }
    }

    /// Returns the first field in which `other` differs, and both values. The capacity may differ.
    pub(super) fn difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let fields = |config: &Self| match config {
            // The name contains all that matters.
            Self::Kv(config) => vec![("cache", config.to_string())],
            Self::Sparse(config) => sparse::fields(config),
        };
        let (ours, theirs) = (fields(self), fields(other));
        if ours[0].0 != theirs[0].0 {
            return Some(("cache", ours[0].1.clone(), theirs[0].1.clone()));
        }
        let pairs =
            ours.into_iter().zip(theirs).map(|((field, here), (_, there))| (field, here, there));
        pairs.into_iter().find(|(_, here, there)| here != there)
    }
}

/// Files contain the configuration of keys and values as it is, and another one by the name of its
/// kind.
impl Serialize for LayerConfig {
    fn serialize<S: serde::Serializer>(
        &self,
        serializer: S,
    ) -> core::result::Result<S::Ok, S::Error> {
        match self {
            Self::Kv(config) => config.serialize(serializer),
            Self::Sparse(sparse) => {
                serializer.serialize_newtype_variant("LayerConfig", 1, SPARSE, sparse)
            }
        }
    }
}

impl<'de> Deserialize<'de> for LayerConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> core::result::Result<Self, D::Error> {
        let mut value = serde_json::Value::deserialize(deserializer)?;
        let sparse = value.as_object_mut().and_then(|fields| fields.remove(SPARSE));
        match sparse {
            Some(sparse) => serde_json::from_value(sparse).map(Self::Sparse),
            None => serde_json::from_value(value).map(Self::Kv),
        }
        .map_err(D::Error::custom)
    }
}

/// The name of [`LayerConfig::Sparse`] in files.
const SPARSE: &str = "sparse";

impl LayerPlan {
    /// Plans the cache of `layer` for `batch` sequences, for which a policy asks `config`.
    pub(crate) fn new(layer: &LayerSpec, config: &KvCacheConfig, batch: usize) -> Self {
        Self {
            config: LayerConfig::new(layer, config),
            shape: layer.cache_shape(batch),
            options: layer.options,
        }
    }

    #[must_use]
    pub(super) fn with_capacity(self, capacity: usize) -> Self {
        Self { config: self.config.with_capacity(capacity), ..self }
    }

    /// Returns the bytes that the cache allocates, as [`LayerCache::memory_bytes`] does.
    pub(crate) fn memory_bytes(&self) -> Result<MemoryBytes> {
        match &self.config {
            LayerConfig::Kv(config) => Ok(CacheLayout::new(config, self.shape)?.memory_bytes()),
            LayerConfig::Sparse(config) => {
                Ok(sparse::memory_bytes(config.memory_bytes(self.shape.batch)?))
            }
        }
    }

    /// Returns the bytes that a decode step reads, as [`LayerCache::bytes_read`] does.
    pub(crate) fn bytes_read(&self, context: usize) -> Result<usize> {
        match &self.config {
            LayerConfig::Kv(config) => {
                Ok(CacheLayout::new(config, self.shape)?.bytes_read(context))
            }
            LayerConfig::Sparse(config) => {
                Ok(sparse::bytes_read(config, self.shape.batch, context))
            }
        }
    }

    /// Allocates the cache.
    pub(super) fn allocate(&self, device: &Device) -> Result<LayerCache> {
        match &self.config {
            LayerConfig::Kv(config) => {
                let cache = KvCache::new(config, self.shape, device)?;
                Ok(LayerCache::Kv(cache.with_options(self.options)?))
            }
            LayerConfig::Sparse(config) => {
                Ok(LayerCache::Sparse(SparseCache::new(config, self.shape.batch, device)?))
            }
        }
    }

    /// Lists the tensors of the cache.
    pub(super) fn parts(&self) -> Result<Vec<Part>> {
        match &self.config {
            LayerConfig::Kv(config) => kv::parts(config, self.shape),
            LayerConfig::Sparse(config) => sparse::parts(config, self.shape.batch, |_| true),
        }
    }

    /// Lists the tensors of a checkpoint at the capacity.
    pub(super) fn kept(&self) -> Result<Vec<Part>> {
        match &self.config {
            LayerConfig::Kv(config) => kv::kept(config, self.shape),
            LayerConfig::Sparse(config) => sparse::parts(config, self.shape.batch, |recent| recent),
        }
    }

    /// Returns the bytes of a checkpoint at the capacity.
    pub(super) fn kept_bytes(&self) -> Result<usize> {
        let bytes = |part: &Part| part.shape.iter().product::<usize>() * part.dtype.size();
        match &self.config {
            LayerConfig::Kv(config) => Ok(kv::kept_bytes(&CacheLayout::new(config, self.shape)?)),
            LayerConfig::Sparse(_) => Ok(self.kept()?.iter().map(bytes).sum()),
        }
    }

    /// Makes a cache of the data of all [`parts`](Self::parts).
    pub(super) fn restore(
        &self,
        lens: Vec<usize>,
        data: Vec<TensorData>,
        device: &Device,
    ) -> Result<LayerCache> {
        match &self.config {
            LayerConfig::Kv(config) => {
                let cache = kv::restore(config, self.shape, lens, data, device)?;
                Ok(LayerCache::Kv(cache.with_options(self.options)?))
            }
            LayerConfig::Sparse(config) => {
                Ok(LayerCache::Sparse(sparse::restore(config, lens, data, device)?))
            }
        }
    }
}

impl LayerSpec {
    /// Returns the bytes of the layer's cache in the formats of `config` for `batch` sequences, as
    /// [`LayerCache::memory_bytes`] does.
    ///
    /// # Errors
    /// Fails for a `config` that does not fit the layer, and for a cache that is too large for one
    /// buffer.
    pub fn cache_bytes(&self, config: &KvCacheConfig, batch: usize) -> Result<MemoryBytes> {
        LayerPlan::new(self, config, batch).memory_bytes()
    }
}
