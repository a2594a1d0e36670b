//! One forward pass through a model: [`Pass`] gives layers the keys and values of earlier tokens.

use std::{collections::BTreeMap, fmt};

use burn::tensor::{DType, Device, Int, Tensor};
use kv_cubecl::{
    AttentionOptions, Drafted, FakeQuantOptions, KvCache, KvMemory, SharedKv, delta::DeltaMemory,
};
use tracing::{trace, trace_span};

use crate::{
    cache::{LayerCache, LayerConfig, ModelCache},
    cache_config::ModelCacheConfig,
    error::{Error, Result},
    nn::{AttentionObserver, Matrix, Memory, Packing, Rope, RopeRows, SparsePlace},
    spans::{LAYER, OPERATION},
    spec::{LayerSpec, ModelSpec},
};

/// The [`Memory`] of every layer in one forward pass.
pub enum Pass<'a> {
    /// Computes the whole sequence at once.
    Parallel {
        /// The model.
        spec: &'a ModelSpec,
        /// The cache whose results are computed in parallel.
        config: &'a ModelCacheConfig,
        /// Options of the quantizer in training.
        fake_quant: FakeQuantOptions,
        /// Receives every layer's attention.
        observer: Option<&'a mut AttentionObserver<'a>>,
    },
    /// Appends tokens to a cache.
    Cached(&'a mut ModelCache),
    /// Works as [`Cached`](Self::Cached), with an observer.
    Observed {
        /// The cache.
        cache: &'a mut ModelCache,
        /// Receives every layer's attention.
        observer: &'a mut AttentionObserver<'a>,
    },
    /// Appends a different number of tokens to each sequence of a cache; the other ids are padding.
    Ragged {
        /// The cache.
        cache: &'a mut ModelCache,
        /// The number of tokens of each sequence.
        tokens: &'a [usize],
        /// The places of the tokens, if the pass computes them without padding.
        packing: Option<&'a Packing>,
    },
    /// Attends as [`Cached`](Self::Cached) or [`Ragged`](Self::Ragged), with tokens that
    /// [`PendingTokens::keep`] may remove again.
    Draft {
        /// The cache.
        cache: &'a mut ModelCache,
        /// The number of tokens of each sequence, at least 2 of one.
        tokens: &'a [usize],
        /// The places of the tokens, if the pass computes them without padding.
        packing: Option<&'a Packing>,
        /// Receives what `keep` needs.
        draft: &'a mut PendingTokens,
    },
    /// Appends one token to a cache, at a position that is stored on the device.
    At {
        /// The cache.
        cache: &'a mut ModelCache,
        /// The token's position, `[1]` i32.
        position: &'a Tensor<1, Int>,
    },
}

impl<'a> Pass<'a> {
    /// Appends all tokens to `cache`, the same number to each sequence.
    pub(crate) fn over(cache: &'a mut ModelCache, tokens: &'a [usize]) -> Self {
        match cache.is_even() {
            true => Self::Cached(cache),
            false => Self::Ragged { cache, tokens, packing: None },
        }
    }
}

impl Pass<'_> {
    /// Returns the rope rows of the `seq` new tokens in a model of `spec`. Must be called before
    /// the first layer runs, because each layer adds the tokens to its cache.
    pub fn ropes(&self, spec: &ModelSpec, seq: usize, device: &Device) -> Ropes {
        if spec.ropes.is_empty() {
            return Ropes(vec![]);
        }
        let _span = trace_span!(target: OPERATION, "ropes").entered();
        Ropes(spec.ropes.iter().map(|rope| self.rope_rows(spec, rope, seq, device)).collect())
    }

    fn rope_rows(&self, spec: &ModelSpec, rope: &Rope, seq: usize, device: &Device) -> RopeRows {
        match self {
            // The context is the capacity of the cache, or the sequence if it is longer.
            Self::Parallel { config, .. } => {
                let capacity = config.capacity.min(spec.max_positions);
                rope.rows(0, seq, seq.max(capacity), device)
            }
            Self::Draft { cache, tokens, .. } if cache.is_even_with(tokens) => {
                range_of(cache, rope, seq, device)
            }
            Self::Cached(cache) | Self::Observed { cache, .. } => {
                range_of(cache, rope, seq, device)
            }
            Self::Ragged { cache, packing, .. } | Self::Draft { cache, packing, .. } => {
                let positions = positions(cache, *packing, seq, device);
                match cache.rope_table(rope, device) {
                    Some(table) => RopeRows::at(table, &positions, seq),
                    None => {
                        let table = rope.table(0, cache.capacity(), cache.room(), device);
                        RopeRows::at(&table, &positions, seq)
                    }
                }
            }
            Self::At { cache, position } => match cache.rope_table(rope, device) {
                Some(table) => RopeRows::at(table, position, 1),
                None => {
                    let table = rope.table(0, cache.capacity(), cache.room(), device);
                    RopeRows::at(&table, position, 1)
                }
            },
        }
    }

    /// Returns the rows of `table` `[max_positions, hidden]` at the positions of the `seq` new
    /// tokens: `[1, seq, hidden]` for all sequences, or `[batch, seq, hidden]`. Must be called
    /// before the first layer runs, because each layer adds the tokens to its cache.
    pub fn rows(&self, table: &Matrix, seq: usize) -> Tensor<3> {
        let [_, hidden] = table.dims();
        match self {
            Self::Parallel { .. } => table.rows(0, seq).unsqueeze(),
            Self::Cached(cache) | Self::Observed { cache, .. } => {
                table.rows(cache.len(), seq).unsqueeze()
            }
            Self::Ragged { cache, packing, .. } | Self::Draft { cache, packing, .. } => {
                let positions = positions(cache, *packing, seq, &table.device());
                let sequences = positions.dims()[0] / seq;
                table.rows_at(&positions).reshape([sequences, seq, hidden])
            }
            Self::At { position, .. } => {
                table.rows_at(position).reshape([position.dims()[0], 1, hidden])
            }
        }
    }

    /// Returns the memory of layer `index`: of a layer that shares a cache, the owner's. The trace
    /// event marks the start of the layer.
    ///
    /// # Panics
    /// Panics when the model or the cache has no such layer.
    pub fn layer(&mut self, index: usize) -> Memory<'_> {
        trace!(target: LAYER, layer = index);
        match self {
            Self::Parallel { spec, config, fake_quant, observer } => {
                let (config, fake_quant) = (config.layer(spec, index), *fake_quant);
                let options = spec.layers[index].options;
                let memory = match LayerConfig::new(&spec.layers[index], &config) {
                    LayerConfig::Kv(config) => {
                        KvMemory::Parallel { config, fake_quant, options }.into()
                    }
                    LayerConfig::Sparse(config) => SparsePlace::Parallel(config).into(),
                    LayerConfig::Delta(config) => Memory::from(DeltaMemory::Parallel(config)),
                };
                match observer {
                    Some(observe) => memory.shown_to(&mut **observe, index, options),
                    None => memory,
                }
            }
            Self::Cached(cache) => cached(cache.layer_mut(index)),
            Self::Observed { cache, observer } => {
                let (memory, options) = match cache.layer_mut(index) {
                    LayerCache::Kv(cache) => {
                        let options = cache.options();
                        (Memory::from(KvMemory::Cached(cache)), options)
                    }
                    LayerCache::Sparse(cache) => {
                        (SparsePlace::Cached(cache).into(), AttentionOptions::default())
                    }
                    LayerCache::Delta(state) => {
                        (DeltaMemory::Cached(state).into(), AttentionOptions::default())
                    }
                };
                memory.shown_to(&mut **observer, index, options)
            }
            Self::Draft { cache, tokens, packing, draft } => {
                let is_even = cache.is_even_with(tokens);
                let layer = cache.layer_mut(index);
                let memory = if is_even { cached(layer) } else { ragged(layer, tokens) };
                memory.packed(*packing).drafting(draft.drafted.entry(index).or_default())
            }
            Self::Ragged { cache, tokens, packing } => {
                ragged(cache.layer_mut(index), tokens).packed(*packing)
            }
            Self::At { cache, position, .. } => match cache.layer_mut(index) {
                LayerCache::Kv(cache) => KvMemory::At(cache, position).into(),
                LayerCache::Sparse(cache) => SparsePlace::At(cache, position).into(),
                LayerCache::Delta(state) => DeltaMemory::At(state, position).into(),
            },
        }
    }
}

/// Returns the rope rows of `seq` tokens after those of a cache whose sequences are equally long.
fn range_of(cache: &ModelCache, rope: &Rope, seq: usize, device: &Device) -> RopeRows {
    match cache.rope_table(rope, device) {
        Some(table) => RopeRows::range(table, cache.len(), seq),
        None => rope.rows(cache.len(), seq, cache.room(), device),
    }
}

/// Returns the positions of the tokens of a pass, `[batch * seq]`, or `[n]` without padding.
fn positions(
    cache: &ModelCache,
    packing: Option<&Packing>,
    seq: usize,
    device: &Device,
) -> Tensor<1, Int> {
    match packing {
        Some(packing) => packing.pack_ids(cache.positions(packing.seq(), device)),
        None => cache.positions(seq, device),
    }
}

/// Returns the memory of a layer that appends the same number of tokens to each sequence.
fn cached(layer: &mut LayerCache) -> Memory<'_> {
    match layer {
        LayerCache::Kv(cache) => KvMemory::Cached(cache).into(),
        LayerCache::Sparse(cache) => SparsePlace::Cached(cache).into(),
        LayerCache::Delta(state) => DeltaMemory::Cached(state).into(),
    }
}

/// Returns the memory of a layer that appends a different number of tokens to each sequence.
fn ragged<'a>(layer: &'a mut LayerCache, tokens: &'a [usize]) -> Memory<'a> {
    match layer {
        LayerCache::Kv(cache) => KvMemory::Ragged(cache, tokens).into(),
        LayerCache::Sparse(cache) => SparsePlace::Ragged(cache, tokens).into(),
        LayerCache::Delta(state) => DeltaMemory::Ragged(state, tokens).into(),
    }
}

/// The tokens of one pass that its caches do not hold yet, or may lose again, by the layer that
/// owns the cache: those of caches that several layers share, and drafted ones.
#[derive(Clone, Debug, Default)]
pub struct PendingTokens {
    shared: BTreeMap<usize, Option<SharedKv>>,
    drafted: BTreeMap<usize, Option<Drafted>>,
}

impl PendingTokens {
    /// Returns the memory of layer `index`, as [`Pass::layer`] does, for a model in which layers
    /// share caches. [`append`](Self::append) must follow the last layer.
    ///
    /// # Errors
    /// Fails for a layer that shares the cache of a layer that has not attended in this pass.
    pub fn layer<'a>(
        &'a mut self,
        pass: &'a mut Pass<'_>,
        spec: &ModelSpec,
        index: usize,
    ) -> Result<Memory<'a>> {
        let memory = pass.layer(index);
        match spec.layers[index].shared {
            None if spec.is_shared(index) => {
                Ok(memory.sharing_with(self.shared.entry(index).or_default()))
            }
            None => Ok(memory),
            Some(owner) => match self.shared.get(&owner) {
                Some(Some(tokens)) => Ok(memory.sharing(tokens)),
                _ => {
                    let rule = "must be an earlier layer that has attended in the same pass";
                    Err(Error::argument("owner of the shared cache", owner, rule))
                }
            },
        }
    }

    /// Appends chunks of tokens to the shared caches, or leaves them to the caller who drafted
    /// them. Until then, layers attend to caches without them.
    ///
    /// # Errors
    /// Fails as [`KvMemory::append_shared`] does.
    pub fn append(self, pass: &mut Pass<'_>) -> Result<()> {
        match pass {
            Pass::Cached(cache) | Pass::Observed { cache, .. } => {
                self.append_to(cache, |cache, tokens| KvMemory::Cached(cache).append_shared(tokens))
            }
            Pass::Ragged { cache, tokens: added, .. } => self.append_to(cache, |cache, tokens| {
                KvMemory::Ragged(cache, added).append_shared(tokens)
            }),
            Pass::Draft { draft, .. } => {
                draft.shared = self.shared;
                Ok(())
            }
            Pass::Parallel { .. } | Pass::At { .. } => Ok(()),
        }
    }

    /// Appends the first `kept[i]` tokens of a [draft](crate::LanguageModel::draft) to each
    /// sequence `i` of the cache that it attended to.
    ///
    /// # Errors
    /// Fails as [`KvCache::keep`] does.
    pub fn keep(self, cache: &mut ModelCache, kept: &[usize]) -> Result<()> {
        let shared = self.shared.into_iter().map(|(owner, it)| (owner, it.map(SharedKv::drafted)));
        for (owner, drafted) in shared.chain(self.drafted) {
            if let (Some(drafted), LayerCache::Kv(cache)) = (drafted, cache.layer_mut(owner)) {
                cache.keep(drafted, kept)?;
            }
        }
        Ok(())
    }

    fn append_to(
        self,
        cache: &mut ModelCache,
        append: impl Fn(&mut KvCache, SharedKv) -> kv_cubecl::Result<()>,
    ) -> Result<()> {
        for (owner, tokens) in self.shared {
            if let (Some(tokens), LayerCache::Kv(cache)) = (tokens, cache.layer_mut(owner)) {
                append(cache, tokens)?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Pass<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Parallel { config, fake_quant, .. } => f
                .debug_struct("Parallel")
                .field("config", config)
                .field("fake_quant", fake_quant)
                .finish_non_exhaustive(),
            Self::Cached(cache) => f.debug_tuple("Cached").field(cache).finish(),
            Self::Observed { cache, .. } => {
                f.debug_struct("Observed").field("cache", cache).finish_non_exhaustive()
            }
            Self::Ragged { cache, tokens, .. } => f
                .debug_struct("Ragged")
                .field("cache", cache)
                .field("tokens", tokens)
                .finish_non_exhaustive(),
            Self::Draft { cache, tokens, .. } => f
                .debug_struct("Draft")
                .field("cache", cache)
                .field("tokens", tokens)
                .finish_non_exhaustive(),
            Self::At { cache, .. } => {
                f.debug_struct("At").field("cache", cache).finish_non_exhaustive()
            }
        }
    }
}

/// The rope rows of one forward pass, for each rope of a model.
#[derive(Clone, Debug)]
pub struct Ropes(pub(crate) Vec<RopeRows>);

impl Ropes {
    /// Returns the rows for a layer; `None` for a layer without rope.
    pub fn of(&self, layer: &LayerSpec) -> Option<&RopeRows> {
        self.0.get(layer.rope?)
    }

    /// Converts the rows with [`RopeRows::to_dtype`].
    #[must_use]
    pub fn to_dtype(&self, dtype: DType) -> Self {
        Self(self.0.iter().map(|rope| rope.to_dtype(dtype)).collect())
    }
}
