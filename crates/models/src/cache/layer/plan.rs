//! The cache of a layer before it is allocated: its configuration, and what is saved of it.

use std::fmt::Debug;

use burn::tensor::{Device, TensorData};
use kv_cubecl::{
    AttentionOptions, CacheShape, KvCache, KvCacheConfig, MemoryBytes,
    delta::{DeltaConfig, DeltaState},
    layout::CacheLayout,
    sparse::{SparseCache, SparseConfig},
};
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use super::{
    LayerCache, delta, kv,
    part::{Growth, Part, PartName},
    sparse,
};
use crate::{error::Result, spec::LayerSpec};

/// The kind and the formats of a layer's cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum LayerConfig {
    Kv(KvCacheConfig),
    Sparse(SparseConfig),
    Delta(DeltaConfig),
}

/// A layer's cache before it is allocated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LayerPlan {
    pub(crate) config: LayerConfig,
    pub(super) shape: CacheShape,
    pub(super) options: AttentionOptions,
}

impl LayerConfig {
    /// Returns the configuration of the cache of `layer`, for which a policy asks `config`.
    pub(crate) fn new(layer: &LayerSpec, config: &KvCacheConfig) -> Self {
        let sparse = || layer.sparse_config(config).map(Self::Sparse);
        let delta = layer.delta_config(config).map(Self::Delta);
        delta.or_else(sparse).unwrap_or(Self::Kv(*config))
    }

    pub(in crate::cache) fn capacity(&self) -> usize {
        match self {
            Self::Kv(config) => config.capacity,
            Self::Sparse(config) => config.capacity,
            Self::Delta(config) => config.capacity,
        }
    }

    #[must_use]
    pub(in crate::cache) fn with_capacity(self, capacity: usize) -> Self {
        match self {
            Self::Kv(config) => Self::Kv(config.with_capacity(capacity)),
            Self::Sparse(config) => Self::Sparse(config.with_capacity(capacity)),
            Self::Delta(config) => Self::Delta(config.with_capacity(capacity)),
        }
    }

    /// Returns the names of all tensors of a cache.
    ///
    /// # Errors
    /// Fails for a configuration that breaks a rule. Files may contain any.
    pub(in crate::cache) fn names(&self) -> Result<Vec<PartName>> {
        match self {
            Self::Kv(_) => Ok(kv::PARTS.to_vec()),
            Self::Sparse(config) => sparse::names(config, |_| true),
            Self::Delta(_) => Ok(delta::PARTS.to_vec()),
        }
    }

    /// Returns the names of the tensors of a checkpoint.
    ///
    /// # Errors
    /// Fails as [`names`](Self::names) does.
    pub(in crate::cache) fn kept_names(&self) -> Result<Vec<PartName>> {
        match self {
            Self::Kv(config) => Ok(kv::kept_names(config).to_vec()),
            Self::Sparse(config) => sparse::names(config, |recent| recent),
            Self::Delta(_) => Ok(delta::PARTS.to_vec()),
        }
    }

    /// Returns the first field in which `other` differs, and both values. The capacity may differ.
    pub(in crate::cache) fn difference(
        &self,
        other: &Self,
    ) -> Option<(&'static str, String, String)> {
        let fields = |config: &Self| match config {
            // The name contains all that matters.
            Self::Kv(config) => vec![("cache", config.to_string())],
            Self::Sparse(config) => sparse::fields(config),
            Self::Delta(config) => delta::fields(config),
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
            Self::Delta(delta) => {
                serializer.serialize_newtype_variant("LayerConfig", 2, DELTA, delta)
            }
        }
    }
}

impl<'de> Deserialize<'de> for LayerConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> core::result::Result<Self, D::Error> {
        let mut value = serde_json::Value::deserialize(deserializer)?;
        let mut named = |kind| value.as_object_mut().and_then(|fields| fields.remove(kind));
        match (named(SPARSE), named(DELTA)) {
            (Some(sparse), _) => serde_json::from_value(sparse).map(Self::Sparse),
            (None, Some(delta)) => serde_json::from_value(delta).map(Self::Delta),
            (None, None) => serde_json::from_value(value).map(Self::Kv),
        }
        .map_err(D::Error::custom)
    }
}

/// The name of [`LayerConfig::Sparse`] in files.
const SPARSE: &str = "sparse";
/// The name of [`LayerConfig::Delta`] in files.
const DELTA: &str = "delta";

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
    pub(in crate::cache) fn with_capacity(self, capacity: usize) -> Self {
        Self { config: self.config.with_capacity(capacity), ..self }
    }

    #[must_use]
    pub(in crate::cache) fn with_batch(self, batch: usize) -> Self {
        let mut shape = self.shape;
        shape.batch = batch;
        Self { shape, ..self }
    }

    /// Returns the first field in which `other` differs, and both values. The capacity may differ.
    pub(in crate::cache) fn difference(
        &self,
        other: &Self,
    ) -> Option<(&'static str, String, String)> {
        let differs = |field, here: &dyn Debug, there: &dyn Debug| {
            let (here, there) = (format!("{here:?}"), format!("{there:?}"));
            (here != there).then_some((field, here, there))
        };
        let (ours, theirs) = (self.shape.to_string(), other.shape.to_string());
        let shapes = || (ours != theirs).then_some(("shape", ours, theirs));
        let (ours, theirs) = (&self.options, &other.options);
        self.config
            .difference(&other.config)
            .or_else(shapes)
            .or_else(|| differs("scale", &ours.scale, &theirs.scale))
            .or_else(|| differs("softcap", &ours.softcap, &theirs.softcap))
    }

    /// Returns the bytes that the cache allocates, as [`LayerCache::memory_bytes`] does.
    pub(crate) fn memory_bytes(&self) -> Result<MemoryBytes> {
        match &self.config {
            LayerConfig::Kv(config) => Ok(CacheLayout::new(config, self.shape)?.memory_bytes()),
            LayerConfig::Sparse(config) => {
                Ok(sparse::memory_bytes(config.memory_bytes(self.shape.batch)?))
            }
            LayerConfig::Delta(config) => {
                Ok(delta::memory_bytes(config.memory_bytes(self.shape.batch)?))
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
            LayerConfig::Delta(config) => Ok(config.memory_bytes(self.shape.batch)?),
        }
    }

    /// Allocates the cache.
    pub(in crate::cache) fn allocate(&self, device: &Device) -> Result<LayerCache> {
        match &self.config {
            LayerConfig::Kv(config) => {
                let cache = KvCache::new(config, self.shape, device)?;
                Ok(LayerCache::Kv(cache.with_options(self.options)?))
            }
            LayerConfig::Sparse(config) => {
                Ok(LayerCache::Sparse(SparseCache::new(config, self.shape.batch, device)?))
            }
            LayerConfig::Delta(config) => {
                Ok(LayerCache::Delta(DeltaState::new(config, self.shape.batch, device)?))
            }
        }
    }

    /// Lists the tensors of the cache.
    pub(in crate::cache) fn parts(&self) -> Result<Vec<Part>> {
        match &self.config {
            LayerConfig::Kv(config) => kv::parts(config, self.shape),
            LayerConfig::Sparse(config) => sparse::parts(config, self.shape.batch, |_| true),
            LayerConfig::Delta(config) => delta::parts(config, self.shape.batch),
        }
    }

    /// Lists the tensors of a checkpoint at the capacity.
    pub(in crate::cache) fn kept(&self) -> Result<Vec<Part>> {
        match &self.config {
            LayerConfig::Kv(config) => kv::kept(config, self.shape),
            LayerConfig::Sparse(config) => sparse::parts(config, self.shape.batch, |recent| recent),
            LayerConfig::Delta(config) => delta::parts(config, self.shape.batch),
        }
    }

    /// Returns what a longer cache does with each of the [`parts`](Self::parts) of a cache of as
    /// many tokens as the capacity.
    pub(in crate::cache) fn growth(&self) -> Result<Vec<Growth>> {
        match &self.config {
            LayerConfig::Kv(config) => kv::growth(config, self.shape),
            LayerConfig::Sparse(config) => sparse::growth(config, self.shape.batch),
            LayerConfig::Delta(_) => Ok(self.parts()?.iter().map(Growth::none).collect()),
        }
    }

    /// Returns the bytes of a checkpoint at the capacity.
    pub(in crate::cache) fn kept_bytes(&self) -> Result<usize> {
        let bytes = |part: &Part| part.shape.iter().product::<usize>() * part.dtype.size();
        match &self.config {
            LayerConfig::Kv(config) => Ok(kv::kept_bytes(&CacheLayout::new(config, self.shape)?)),
            LayerConfig::Sparse(_) | LayerConfig::Delta(_) => {
                Ok(self.kept()?.iter().map(bytes).sum())
            }
        }
    }

    /// Makes a cache of the data of all [`parts`](Self::parts).
    pub(in crate::cache) fn restore(
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
            LayerConfig::Delta(config) => {
                Ok(LayerCache::Delta(delta::restore(config, lens, data, device)?))
            }
        }
    }
}

impl LayerSpec {
    /// Returns the bytes of the layer's cache in the formats of `config` for `batch` sequences, as
    /// [`LayerCache::memory_bytes`] does; 0 for a layer that shares the cache of another.
    ///
    /// # Errors
    /// Fails for a `config` that does not fit the layer, and for a cache that is too large for one
    /// buffer.
    pub fn cache_bytes(&self, config: &KvCacheConfig, batch: usize) -> Result<MemoryBytes> {
        if self.shared.is_some() {
            return Ok(MemoryBytes::default());
        }
        LayerPlan::new(self, config, batch).memory_bytes()
    }
}
