//! [`SparseMemory`]: a layer's access to earlier tokens.

use burn::tensor::{Int, Tensor};

use super::{
    Compressed, Entries, EntryCompressor, Gated, IndexQuery, KeyCompressor, Selection, SparseCache,
    SparseConfig, SparseOptions,
    cache::Call,
    compressor::Compressor,
    index_scores, select_entries, sparse_attention,
    trace::{IndexTrace, Observer, SparseTrace},
};
use crate::{Result, error::invalid, functions::store};

/// The access of one layer of sparse attention to earlier tokens. With it, the same code of a layer
/// serves training, evaluation and streaming.
#[derive(Debug)]
pub struct SparseMemory<'a> {
    place: Place<'a>,
    observer: Option<Observer<'a>>,
}

#[derive(Debug)]
enum Place<'a> {
    Parallel(SparseConfig),
    Cached(&'a mut SparseCache, Box<Call>),
}

/// The entries that a query attends to, besides recent tokens.
#[derive(Clone, Copy, Debug)]
pub enum Visible<'a> {
    /// No entries: the layer has a window only.
    Window,
    /// All entries of complete windows.
    All(&'a Entries),
    /// Entries that an indexer has selected.
    Selected(&'a Entries, &'a Selection),
}

impl<'a> SparseMemory<'a> {
    /// Computes a whole sequence in parallel, with gradients, as a cache of `config` would.
    pub fn parallel(config: SparseConfig) -> Self {
        Self { place: Place::Parallel(config), observer: None }
    }

    /// Appends the tokens of the call to `cache`: `added` to each sequence.
    ///
    /// # Errors
    /// [`Error::SequenceFull`](crate::Error::SequenceFull) or
    /// [`Error::CapacityExceeded`](crate::Error::CapacityExceeded) if they do not fit; the cache is
    /// then unchanged.
    pub fn cached(cache: &'a mut SparseCache, added: &[usize]) -> Result<Self> {
        if added.len() != cache.lens().len() {
            let rule = format!("must be a number for each of {} sequences", cache.lens().len());
            return Err(invalid("added", added.len(), rule));
        }
        let call = cache.call(added)?;
        Ok(Self { place: Place::Cached(cache, Box::new(call)), observer: None })
    }

    /// Appends one token to each sequence of `cache`, at a position that is stored on the device,
    /// i32 `[1]` or `[batch]`. A sequence with a position below 0, or not below the capacity, takes
    /// no part. The host's lengths do not change; see [`SparseCache::advance`].
    pub fn at(cache: &'a mut SparseCache, position: &Tensor<1, Int>) -> Self {
        let call = cache.call_at(position);
        Self { place: Place::Cached(cache, Box::new(call)), observer: None }
    }

    /// Passes what the layer computes to `observe`, when the layer attends.
    #[must_use]
    pub fn shown_to(self, observe: impl FnOnce(SparseTrace) + 'a) -> Self {
        let observe = Box::new(observe);
        Self { observer: Some(Observer { observe, index: None }), ..self }
    }

    fn config(&self) -> &SparseConfig {
        match &self.place {
            Place::Parallel(config) => config,
            Place::Cached(cache, _) => cache.config(),
        }
    }

    /// Compresses the call's tokens, and returns all entries.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) for a compressor of another ratio or
    /// width than the layer's, and [`Error::Shape`](crate::Error::Shape) for projections that do
    /// not fit.
    pub fn compress(&mut self, compressor: &EntryCompressor, gated: Gated) -> Result<Entries> {
        self.check(&compressor.0, self.config().head_dim, "head_dim")?;
        compressor.0.check("compress", &gated)?;
        match &mut self.place {
            Place::Parallel(config) => {
                let entries = compressor.compress(gated)?;
                let stored = entries.map(|entries| config.entries.rounded(entries));
                Ok(Entries::parallel(stored))
            }
            Place::Cached(cache, call) => {
                cache.compress(&compressor.0, gated, call)?;
                let entries = cache.entries.as_ref().expect("it has been written");
                Ok(Entries::of_cache(entries.rows.clone()))
            }
        }
    }

    /// Compresses the call's tokens to keys, and selects entries for each of them.
    ///
    /// # Errors
    /// Fails as [`compress`](Self::compress) does, and with
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) for a layer without an indexer.
    pub fn select(
        &mut self,
        compressor: &KeyCompressor,
        gated: Gated,
        query: &IndexQuery,
    ) -> Result<Selection> {
        let (Some(index), Some(compression)) = (self.config().index, self.config().compression)
        else {
            return Err(invalid("index", "none", "the layer has no indexer to select with"));
        };
        self.check(&compressor.0, index.head_dim, "index.head_dim")?;
        compressor.0.check("select", &gated)?;
        query.check("select", index.head_dim)?;
        match &mut self.place {
            Place::Parallel(_) => {
                let [batch, _, tokens, _] = query.query.dims();
                let Some(keys) = compressor.compress(gated)? else {
                    return Ok(Selection::none(batch, tokens, &query.query.device()));
                };
                let scores = index_scores(query, &index.keys.rounded(keys.clone()))?;
                let selection = select_entries(scores.clone(), 0, compression, index.top_k)?;
                if let Some(observer) = &mut self.observer {
                    let (query, selection) = (query.clone(), selection.clone());
                    observer.index = Some(IndexTrace { query, keys, scores, selection });
                }
                Ok(selection)
            }
            Place::Cached(cache, call) => {
                cache.select_entries(&compressor.0, gated, query, index.top_k, call)
            }
        }
    }

    /// Checks a compressor against the layer.
    fn check(&self, compressor: &Compressor, width: usize, field: &'static str) -> Result<()> {
        let config = self.config();
        if Some(compressor.compression) != config.compression {
            let rule = format!("must be the layer's {:?}", config.compression);
            return Err(invalid("compression", format!("{:?}", compressor.compression), rule));
        }
        if compressor.width() != width {
            let rule = format!("must be the {width} channels of the layer");
            return Err(invalid(field, compressor.width(), rule));
        }
        Ok(())
    }

    /// Attends to recent tokens, the call's among them, and to entries.
    ///
    /// # Shapes
    /// - `query`: `[batch, n_heads, tokens, head_dim]`, after rope
    /// - `rows`: `[batch, 1, tokens, head_dim]`, the tokens' own keys and values, after rope
    /// - output: f32 `[batch, n_heads, tokens, head_dim]`, before rope is undone
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) if `visible` is not what the layer's
    /// configuration says, so that no layer silently attends to its window only;
    /// [`Error::Shape`](crate::Error::Shape) for tensors that do not fit.
    pub fn attend(
        self,
        query: Tensor<4>,
        rows: Tensor<4>,
        visible: Visible<'_>,
        sink_logits: Option<Tensor<1>>,
    ) -> Result<Tensor<4>> {
        let config = *self.config();
        let (entries, selection) = config.seen(visible)?;
        check_attend(&config, &query, &rows, sink_logits.as_ref())?;
        let Self { place, observer } = self;
        let observed = observer.map(|observer| {
            (observer, query.clone(), rows.clone(), entries.cloned(), sink_logits.clone())
        });
        let output = match place {
            Place::Parallel(_) => {
                let options = SparseOptions {
                    sliding_window: config.sliding_window,
                    scale: None,
                    sink_logits,
                };
                let entries = entries.and_then(Entries::tensor);
                let compressed = entries.zip(config.compression);
                let compressed = compressed.map(|(entries, compression)| Compressed {
                    entries,
                    compression,
                    selection,
                });
                sparse_attention(query, &store(rows, config.float), compressed, &options)?
            }
            Place::Cached(cache, call) => {
                let entries = entries.and_then(Entries::cached);
                cache.attend(query, rows, entries, selection, sink_logits, &call)
            }
        };
        if let Some((Observer { observe, index }, query, rows, entries, sink_logits)) = observed {
            let output = output.clone();
            observe(SparseTrace { config, query, rows, entries, index, sink_logits, output });
        }
        Ok(output)
    }
}

impl SparseConfig {
    /// Returns the entries and the selection of `visible`, which must be what the layer has.
    fn seen<'v>(
        &self,
        visible: Visible<'v>,
    ) -> Result<(Option<&'v Entries>, Option<&'v Selection>)> {
        match (visible, self.compression, self.index) {
            (Visible::Window, None, _) => Ok((None, None)),
            (Visible::All(entries), Some(_), None) => Ok((Some(entries), None)),
            (Visible::Selected(entries, selection), Some(_), Some(_)) => {
                Ok((Some(entries), Some(selection)))
            }
            (Visible::Window, Some(_), _) => {
                Err(invalid("entries", "none", "the layer has compressed entries"))
            }
            (Visible::All(_), Some(_), Some(_)) => {
                let rule = "the layer has an indexer, so entries must be selected";
                Err(invalid("selection", "none", rule))
            }
            (Visible::All(_) | Visible::Selected(..), ..) => {
                let rule = "the layer's configuration has no such entries";
                Err(invalid("entries", "some", rule))
            }
        }
    }
}

/// Checks the shapes of [`SparseMemory::attend`].
fn check_attend(
    config: &SparseConfig,
    query: &Tensor<4>,
    rows: &Tensor<4>,
    sink_logits: Option<&Tensor<1>>,
) -> Result<()> {
    let [batch, heads, tokens, width] = query.dims();
    if rows.dims() != [batch, 1, tokens, width] || width != config.head_dim {
        let rule = format!("must be [{batch}, 1, {tokens}, {}]", config.head_dim);
        let shape = rows.dims().to_vec();
        return Err(crate::Error::Shape { op: "attend", tensor: "rows", shape, rule });
    }
    if let Some(logits) = sink_logits.filter(|logits| logits.dims() != [heads]) {
        let rule = format!("must be [n_heads], [{heads}]");
        let shape = logits.dims().to_vec();
        return Err(crate::Error::Shape { op: "attend", tensor: "sink_logits", shape, rule });
    }
    Ok(())
}
