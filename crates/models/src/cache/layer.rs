//! [`LayerCache`]: the cache of one layer, of whatever kind, and how it is saved.

mod delta;
mod kv;
mod part;
mod plan;
mod sparse;

use burn::tensor::{Device, TensorData};
use kv_cubecl::{
    AttentionOptions, CacheShape, KvCache, KvCacheConfig, MemoryBytes,
    delta::DeltaState,
    sparse::{SparseCache, SparseConfig},
};

pub(super) use self::part::{Growth, Part, PartName};
pub(crate) use self::plan::{LayerConfig, LayerPlan};
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
    /// The recurrent state of a layer of the gated delta rule.
    Delta(DeltaState),
}

/// Evaluates an expression for the cache of any kind.
macro_rules! each {
    ($layer:expr, $cache:ident => $result:expr) => {
        match $layer {
            LayerCache::Kv($cache) => $result,
            LayerCache::Sparse($cache) => $result,
            LayerCache::Delta($cache) => $result,
        }
    };
}

impl LayerCache {
    /// Returns the keys and values; `None` for a layer that keeps something else.
    pub fn kv(&self) -> Option<&KvCache> {
        match self {
            Self::Kv(cache) => Some(cache),
            Self::Sparse(_) | Self::Delta(_) => None,
        }
    }

    /// Returns the recent tokens and entries of a layer with sparse attention; `None` for another
    /// layer.
    pub fn sparse(&self) -> Option<&SparseCache> {
        match self {
            Self::Sparse(cache) => Some(cache),
            Self::Kv(_) | Self::Delta(_) => None,
        }
    }

    /// Returns the state of a recurrent layer; `None` for another layer.
    pub fn delta(&self) -> Option<&DeltaState> {
        match self {
            Self::Delta(state) => Some(state),
            Self::Kv(_) | Self::Sparse(_) => None,
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
    /// entries as values, the keys of its indexer as keys, and everything else as floats, as is the
    /// state of a recurrent layer.
    pub fn memory_bytes(&self) -> MemoryBytes {
        match self {
            Self::Kv(cache) => cache.memory_bytes(),
            Self::Sparse(cache) => sparse::memory_bytes(cache.memory_bytes()),
            Self::Delta(state) => delta::memory_bytes(state.memory_bytes()),
        }
    }

    /// Returns the bytes that a decode step reads of each sequence's `context` tokens, over all
    /// sequences.
    pub fn bytes_read(&self, context: usize) -> usize {
        match self {
            Self::Kv(cache) => cache.layout().bytes_read(context),
            Self::Sparse(cache) => sparse::bytes_read(cache.config(), cache.lens().len(), context),
            Self::Delta(state) => state.memory_bytes(),
        }
    }

    pub(super) fn reset(&mut self) {
        each!(self, cache => cache.reset());
    }

    pub(super) fn count_restored(&mut self) {
        match self {
            Self::Kv(cache) => cache.count_restored(),
            // Sparse attention reads codes in place, and a state has none.
            Self::Sparse(_) | Self::Delta(_) => {}
        }
    }

    pub(super) fn select(&self, sequences: &[usize]) -> Result<Self> {
        Ok(match self {
            Self::Kv(cache) => Self::Kv(cache.select(sequences)?),
            Self::Sparse(cache) => Self::Sparse(cache.select(sequences)?),
            Self::Delta(state) => Self::Delta(state.select(sequences)?),
        })
    }

    pub(super) fn join<'a>(caches: impl Iterator<Item = &'a Self> + Clone) -> Result<Self> {
        let kv: Option<Vec<_>> = caches.clone().map(|cache| cache.kv().cloned()).collect();
        if let Some(kv) = kv {
            return Ok(Self::Kv(KvCache::join(&kv)?));
        }
        let sparse: Option<Vec<_>> = caches.clone().map(|cache| cache.sparse().cloned()).collect();
        if let Some(sparse) = sparse {
            return Ok(Self::Sparse(SparseCache::join(&sparse)?));
        }
        let states: Option<Vec<_>> = caches.map(|cache| cache.delta().cloned()).collect();
        match states {
            Some(states) => Ok(Self::Delta(DeltaState::join(&states)?)),
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
            (Self::Delta(state), Self::Delta(other)) => Ok(state.admit(sequence, other)?),
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
            Self::Sparse(_) | Self::Delta(_) => lost && len > 0,
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
            Self::Delta(state) => state.truncate(sequence, len)?,
        }
        Ok(())
    }

    pub(super) fn resized(&self, capacity: usize) -> Result<Self> {
        Ok(match self {
            Self::Kv(cache) => Self::Kv(cache.resized(capacity)?),
            Self::Sparse(cache) => Self::Sparse(cache.resized(capacity)?),
            Self::Delta(state) => Self::Delta(state.resized(capacity)?),
        })
    }

    /// Returns whether the cache was made for such a layer, in any format.
    pub(super) fn fits(&self, layer: &LayerSpec, batch: usize) -> bool {
        match self {
            Self::Kv(cache) => {
                let kv = layer.sparse.is_none() && layer.has_cache();
                kv && cache.layout().shape() == layer.cache_shape(batch)
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
            Self::Delta(state) => {
                let own = state.config();
                let asked = layer.delta;
                let asked = asked.map(|it| it.with_float(own.float).with_capacity(own.capacity));
                state.lens().len() == batch && asked.as_ref() == Some(own)
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
            Self::Delta(state) => {
                let config = *state.config();
                LayerPlan {
                    config: LayerConfig::Delta(config),
                    shape: CacheShape::new(state.lens().len(), config.n_key_heads, config.head_dim),
                    options: AttentionOptions::default(),
                }
            }
        }
    }

    /// Reads the tensors of the cache, which [`LayerPlan::parts`] lists.
    pub(super) fn into_data(self) -> Result<Vec<TensorData>> {
        match self {
            Self::Kv(cache) => kv::into_data(cache),
            Self::Sparse(cache) => sparse::into_data(&cache),
            Self::Delta(state) => delta::into_data(&state),
        }
    }

    /// Reads what the cache loses as it grows, which [`LayerPlan::kept`] lists for its length.
    pub(super) fn checkpoint(&self) -> Result<Vec<TensorData>> {
        match self {
            Self::Kv(cache) => kv::checkpoint(cache),
            Self::Sparse(cache) => sparse::checkpoint(cache),
            // A state contains no earlier one, so all of it is kept.
            Self::Delta(state) => delta::into_data(state),
        }
    }

    /// Returns this cache of one sequence, cut back to the `len` tokens that it had when
    /// [`checkpoint`](Self::checkpoint) returned `kept`.
    pub(super) fn at_checkpoint(&self, len: usize, kept: &[TensorData]) -> Result<Self> {
        match self {
            Self::Kv(cache) => Ok(Self::Kv(kv::at_checkpoint(cache, len, kept)?)),
            Self::Sparse(cache) => Ok(Self::Sparse(sparse::at_checkpoint(cache, len, kept)?)),
            Self::Delta(state) => {
                let (config, device) = (state.config(), state.device());
                Ok(Self::Delta(delta::restore(config, vec![len], kept.to_vec(), &device)?))
            }
        }
    }
}

fn other_kind(op: &str) -> Error {
    Error::unsupported(format!("{op}: a cache of another kind"), "layers must have equal kinds")
}
