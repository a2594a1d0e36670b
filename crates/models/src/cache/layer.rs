//! [`LayerCache`]: the cache of one layer, of whatever kind, and how it is saved.

use std::{iter, ops::Range};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_cubecl::{
    AttentionOptions, CacheParts, CacheShape, KvCache, KvCacheConfig, MemoryBytes, Side,
    layout::{CacheLayout, Schedule},
    sparse::{RowFormat, RowLayout, SparseCache, SparseConfig, SparsePart, SparseTensor},
};
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use crate::{
    error::{Error, Result},
    spec::LayerSpec,
};

/// What one layer of a model keeps of earlier tokens.
#[derive(Clone, Debug)]
#[non_exhaustive]
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
            Self::Sparse(cache) => sparse_bytes(cache.memory_bytes()),
        }
    }

    /// Returns the bytes that a decode step reads of each sequence's `context` tokens, over all
    /// sequences.
    pub fn bytes_read(&self, context: usize) -> usize {
        match self {
            Self::Kv(cache) => cache.layout().bytes_read(context),
            Self::Sparse(cache) => sparse_bytes_read(cache.config(), cache.lens().len(), context),
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
            Self::Kv(cache) => {
                let CacheParts { keys, values, floats, .. } = cache.into_parts();
                let data = [keys.try_into_data(), values.try_into_data(), floats.try_into_data()];
                data.into_iter().map(readable).collect()
            }
            Self::Sparse(cache) => {
                let data = cache.parts().into_iter().map(|part| part.tensor);
                data.map(|tensor| {
                    readable(match tensor {
                        SparseTensor::Codes(words) => words.try_into_data(),
                        SparseTensor::Floats(rows) => rows.try_into_data(),
                    })
                })
                .collect()
            }
        }
    }

    /// Reads what the cache loses as it grows, which [`LayerPlan::kept`] lists for its length.
    pub(super) fn checkpoint(&self) -> Result<Vec<TensorData>> {
        match self {
            Self::Kv(cache) => kv_checkpoint(cache),
            Self::Sparse(cache) => {
                let kept = cache.resized(cache.len())?;
                let plan = kept.config().parts(1)?;
                let data = LayerCache::Sparse(kept).into_data()?;
                let pairs = plan.into_iter().zip(data);
                Ok(pairs.filter(|(part, _)| part.recent).map(|(_, data)| data).collect())
            }
        }
    }

    /// Returns this cache of one sequence, cut back to the `len` tokens that it had when
    /// [`checkpoint`](Self::checkpoint) returned `kept`.
    pub(super) fn at_checkpoint(&self, len: usize, kept: &[TensorData]) -> Result<Self> {
        match self {
            Self::Kv(cache) => Ok(Self::Kv(kv_at_checkpoint(cache, len, kept)?)),
            Self::Sparse(cache) => Ok(Self::Sparse(sparse_at_checkpoint(cache, len, kept)?)),
        }
    }
}

fn other_kind(op: &str) -> Error {
    Error::unsupported(format!("{op}: a cache of another kind"), "layers must have equal kinds")
}

fn readable<E: ToString>(data: core::result::Result<TensorData, E>) -> Result<TensorData> {
    data.map_err(|error| Error::argument("cache", error.to_string(), "must be readable"))
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

/// The name of a tensor of a layer's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PartName {
    pub(super) name: &'static str,
    /// Whether it is a list of u32 words, and not rows of floats.
    pub(super) words: bool,
}

/// A tensor of a layer's cache without its numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) name: &'static str,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
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
            Self::Kv(_) => Ok(KV_PARTS.to_vec()),
            Self::Sparse(config) => sparse_names(config, |_| true),
        }
    }

    /// Returns the names of the tensors of a checkpoint.
    ///
    /// # Errors
    /// As [`names`](Self::names).
    pub(super) fn kept_names(&self) -> Result<Vec<PartName>> {
        match self {
            Self::Kv(config) => Ok(kv_kept(config).to_vec()),
            Self::Sparse(config) => sparse_names(config, |recent| recent),
        }
    }

    /// Returns the first field in which `other` differs, and both values. The capacity may differ.
    pub(super) fn difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let fields = |config: &Self| match config {
            // The name contains all that matters.
            Self::Kv(config) => vec![("cache", config.to_string())],
            Self::Sparse(config) => sparse_fields(config),
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
            LayerConfig::Sparse(config) => Ok(sparse_bytes(config.memory_bytes(self.shape.batch)?)),
        }
    }

    /// Returns the bytes that a decode step reads, as [`LayerCache::bytes_read`] does.
    pub(crate) fn bytes_read(&self, context: usize) -> Result<usize> {
        match &self.config {
            LayerConfig::Kv(config) => {
                Ok(CacheLayout::new(config, self.shape)?.bytes_read(context))
            }
            LayerConfig::Sparse(config) => Ok(sparse_bytes_read(config, self.shape.batch, context)),
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
            LayerConfig::Kv(config) => {
                let layout = CacheLayout::new(config, self.shape)?;
                let words = layout.sides().map(|side| vec![side.words(layout.slices())]);
                let [keys, values, floats] = KV_PARTS.map(|part| part.name);
                let (dtype, shape) = (config.float.dtype(), layout.float_shape().to_vec());
                Ok(vec![
                    Part { name: keys, dtype: DType::U32, shape: words.keys },
                    Part { name: values, dtype: DType::U32, shape: words.values },
                    Part { name: floats, dtype, shape },
                ])
            }
            LayerConfig::Sparse(config) => sparse_parts(config, self.shape.batch, |_| true),
        }
    }

    /// Lists the tensors of a checkpoint at the capacity.
    pub(super) fn kept(&self) -> Result<Vec<Part>> {
        match &self.config {
            LayerConfig::Kv(config) => {
                let layout = CacheLayout::new(config, self.shape)?;
                let names = kv_kept(config);
                let all = self.parts()?.into_iter();
                let kept = all.filter(|part| names.iter().any(|kept| kept.name == part.name));
                Ok(kept
                    .map(|part| match part.dtype {
                        DType::U32 => part,
                        _ => Part { shape: kept_shape(&layout).to_vec(), ..part },
                    })
                    .collect())
            }
            LayerConfig::Sparse(config) => sparse_parts(config, self.shape.batch, |recent| recent),
        }
    }

    /// Returns the bytes of a checkpoint at the capacity.
    pub(super) fn kept_bytes(&self) -> Result<usize> {
        let bytes = |part: &Part| part.shape.iter().product::<usize>() * part.dtype.size();
        match &self.config {
            LayerConfig::Kv(config) => Ok(kv_kept_bytes(&CacheLayout::new(config, self.shape)?)),
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
                let Ok([keys, values, floats]) = <[TensorData; 3]>::try_from(data) else {
                    return Err(Error::argument("parts", "too few", "must be three"));
                };
                let words = |words| Tensor::<1, Int>::from_data(words, (device, DType::U32));
                let dtype = floats.dtype();
                let parts = CacheParts {
                    keys: words(keys),
                    values: words(values),
                    floats: Tensor::from_data(floats, (device, dtype)),
                    lens,
                };
                let cache = KvCache::from_parts(config, self.shape, parts)?;
                Ok(LayerCache::Kv(cache.with_options(self.options)?))
            }
            LayerConfig::Sparse(config) => {
                let names = sparse_names(config, |_| true)?;
                let parts = names.into_iter().zip(data);
                let parts = parts.map(|(part, data)| sparse_part(part, data, device)).collect();
                Ok(LayerCache::Sparse(sparse_of(config, lens, parts, device)?))
            }
        }
    }
}

/// The tensors of a [`KvCache`].
const KV_PARTS: [PartName; 3] = [
    PartName { name: "keys", words: true },
    PartName { name: "values", words: true },
    PartName { name: "floats", words: false },
];

/// Returns the parts of a [`KvCache`] that a checkpoint keeps.
fn kv_kept(config: &KvCacheConfig) -> &'static [PartName] {
    let schedule = Schedule::new(config);
    match (schedule.sliding_window, schedule.is_exact_anywhere()) {
        // A sliding window overwrites the tokens that it no longer sees.
        (Some(_), _) => &KV_PARTS,
        (None, true) => &[],
        (None, false) => &KV_PARTS[2..],
    }
}

/// Returns the elements of a slice's float rows that a checkpoint keeps: all of them with a sliding
/// window, otherwise those of quantized sides, whose rings are short.
fn kept_elements(layout: &CacheLayout) -> Vec<Range<usize>> {
    if layout.schedule().sliding_window.is_some() {
        return iter::once(0..layout.float_elements()).collect();
    }
    // A quantized side has a ring, unless it is never quantized.
    let sides = Side::BOTH.map(|side| layout.sides()[side]);
    let quantized = sides.into_iter().filter(|side| side.spec.is_some());
    let elements =
        quantized.map(|side| side.first_element..side.first_element + side.rows() * side.head_dim);
    elements.filter(|elements| !elements.is_empty()).collect()
}

/// Returns the shape of the floats that a checkpoint keeps of a layer.
fn kept_shape(layout: &CacheLayout) -> [usize; 2] {
    [layout.slices(), kept_elements(layout).iter().map(Range::len).sum()]
}

/// Returns the bytes that a checkpoint keeps of a layer.
fn kv_kept_bytes(layout: &CacheLayout) -> usize {
    match kv_kept(layout.config()) {
        [] => 0,
        [_] => kept_shape(layout).iter().product::<usize>() * layout.config().float.dtype().size(),
        _ => layout.memory_bytes().total(),
    }
}

fn kv_checkpoint(cache: &KvCache) -> Result<Vec<TensorData>> {
    let kept = kv_kept(cache.layout().config());
    if kept.is_empty() {
        return Ok(vec![]);
    }
    let cache = cache.resized(cache.len())?;
    let layout = *cache.layout();
    let CacheParts { keys, values, floats, .. } = cache.into_parts();
    let rows: Tensor<2> = floats.reshape([layout.slices(), layout.float_elements()]);
    let rows = kept_elements(&layout)
        .into_iter()
        .map(|elements| rows.clone().narrow(1, elements.start, elements.len()));
    let floats = Tensor::cat(rows.collect(), 1);
    let mut data = vec![];
    if kept.len() > 1 {
        data.extend([keys.try_into_data(), values.try_into_data()]);
    }
    data.push(floats.try_into_data());
    data.into_iter().map(readable).collect()
}

fn kv_at_checkpoint(cache: &KvCache, len: usize, kept: &[TensorData]) -> Result<KvCache> {
    let (config, shape) = (cache.layout().config(), cache.layout().shape());
    let Some((floats, words)) = kept.split_last() else {
        let mut cache = cache.clone();
        cache.cut_back(0, len)?;
        return Ok(cache);
    };
    let device = cache.device();
    // The codes of the first tokens are still in the longer cache.
    let now = CacheParts { lens: vec![len], ..cache.clone().into_parts() };
    let now = KvCache::from_parts(config, shape, now)?.resized(len)?;
    let layout = *now.layout();
    let mut parts = now.into_parts();
    if let [keys, values] = words {
        let words = |data: &TensorData| Tensor::from_data(data.clone(), (&device, data.dtype()));
        (parts.keys, parts.values) = (words(keys), words(values));
    }
    let float_shape = parts.floats.dims();
    let mut rows: Tensor<2> = parts.floats.reshape([layout.slices(), layout.float_elements()]);
    let floats: Tensor<2> = Tensor::from_data(floats.clone(), (&device, floats.dtype()));
    let mut from = 0;
    for elements in kept_elements(&layout) {
        let n = elements.len();
        let part = floats.clone().narrow(1, from, n);
        rows = rows.slice_assign([0..layout.slices(), elements], part);
        from += n;
    }
    parts.floats = rows.reshape(float_shape);
    let short = KvCache::from_parts(&config.with_capacity(len), shape, parts)?;
    Ok(short.with_options(cache.options())?.resized(config.capacity)?)
}

fn sparse_bytes(bytes: kv_cubecl::sparse::SparseBytes) -> MemoryBytes {
    MemoryBytes { keys: bytes.keys, values: bytes.entries, floats: bytes.window + bytes.open }
}

/// Returns the bytes of the recent tokens, the keys and the entries that a decode step reads.
fn sparse_bytes_read(config: &SparseConfig, batch: usize, context: usize) -> usize {
    let bytes = |slots: usize, width: usize, format: RowFormat| match slots {
        0 => 0,
        _ => RowLayout { batch, slots, width, format }.bytes(),
    };
    let entries = config.compression.map_or(0, |compression| compression.entries(context));
    let attended = config.index.map_or(entries, |index| entries.min(index.top_k));
    let recent = context.min(config.sliding_window);
    bytes(recent, config.head_dim, RowFormat::float(config.float))
        + bytes(attended, config.head_dim, config.entries)
        + config.index.map_or(0, |index| bytes(entries, index.head_dim, index.keys))
}

fn sparse_parts(
    config: &SparseConfig,
    batch: usize,
    keeps: impl Fn(bool) -> bool,
) -> Result<Vec<Part>> {
    let parts = config.parts(batch)?.into_iter().filter(|part| keeps(part.recent));
    Ok(parts.map(|part| Part { name: part.name, dtype: part.dtype, shape: part.shape }).collect())
}

fn sparse_names(config: &SparseConfig, keeps: impl Fn(bool) -> bool) -> Result<Vec<PartName>> {
    let parts = sparse_parts(config, 1, keeps)?.into_iter();
    Ok(parts.map(|part| PartName { name: part.name, words: part.dtype == DType::U32 }).collect())
}

fn sparse_part(part: PartName, data: TensorData, device: &Device) -> SparsePart {
    let dtype = data.dtype();
    let tensor = match part.words {
        true => SparseTensor::Codes(Tensor::from_data(data, (device, DType::U32))),
        false => SparseTensor::Floats(Tensor::from_data(data, (device, dtype))),
    };
    SparsePart { name: part.name, tensor }
}

fn sparse_of(
    config: &SparseConfig,
    lens: Vec<usize>,
    parts: Vec<SparsePart>,
    device: &Device,
) -> Result<SparseCache> {
    SparseCache::from_parts(config, lens, device, |name, _| {
        let part = parts.iter().find(|part| part.name == name);
        let part = part.ok_or_else(|| Error::argument("parts", name, "is missing"))?;
        Ok::<_, Error>(part.tensor.clone())
    })
}

/// Entries and keys of the first tokens are still in the longer cache; recent tokens and the
/// projections of open windows are taken from the checkpoint.
fn sparse_at_checkpoint(
    cache: &SparseCache,
    len: usize,
    kept: &[TensorData],
) -> Result<SparseCache> {
    let (config, device) = (*cache.config(), cache.device());
    let now = sparse_of(&config, vec![len], cache.parts(), &device)?.resized(len)?;
    let short = *now.config();
    let mut kept = kept.iter();
    let parts = short.parts(1)?.into_iter().zip(now.parts()).map(|(plan, part)| {
        match plan.recent.then(|| kept.next()).flatten() {
            Some(data) => {
                let words = plan.dtype == DType::U32;
                sparse_part(PartName { name: plan.name, words }, data.clone(), &device)
            }
            None => part,
        }
    });
    Ok(sparse_of(&short, vec![len], parts.collect(), &device)?.resized(config.capacity)?)
}

fn sparse_fields(config: &SparseConfig) -> Vec<(&'static str, String)> {
    let row = |format: RowFormat| match (format.codes.is_quantized(), format.float_channels) {
        (false, _) => format.float.name().to_string(),
        (true, 0) => format.codes.to_string(),
        (true, n) => format!("{} and {n} channels of {}", format.codes, format.float.name()),
    };
    let compression = config.compression.map_or("none".into(), |compression| {
        let overlap = if compression.overlap { " with overlap" } else { "" };
        format!("1 entry for {} tokens{overlap}", compression.ratio)
    });
    let index = config.index.map_or("none".into(), |index| {
        format!("top {} by keys of {} channels", index.top_k, index.head_dim)
    });
    vec![
        ("head_dim", config.head_dim.to_string()),
        ("sliding_window", config.sliding_window.to_string()),
        ("compression", compression),
        ("index", index),
        ("cache", config.float.name().to_string()),
        ("cache", format!("entries in {}", row(config.entries))),
        (
            "cache",
            config.index.map_or("none".into(), |it| format!("index keys in {}", row(it.keys))),
        ),
        ("rollback", config.rollback.to_string()),
    ]
}
