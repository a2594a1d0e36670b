//! Selects, reorders and repeats the sequences of a batch, and joins batches.

use super::{KvCache, state::State};
use crate::{CacheShape, Error, Result, layout::CacheLayout, sequences::check_sequence};

impl KvCache {
    /// Copies the given sequences of the batch to a new cache, in this order. A sequence may occur
    /// several times, as in beam search.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for no sequences, and for one that the batch does not have.
    pub fn select(&self, sequences: &[usize]) -> Result<Self> {
        let shape = self.layout.shape();
        sequences
            .iter()
            .try_for_each(|&sequence| check_sequence("sequence", sequence, shape.batch))?;
        let shape = CacheShape { batch: sequences.len(), ..shape };
        let layout = CacheLayout::new(self.layout.config(), shape)?;
        let state = self.state.select(&self.layout, &layout, sequences);
        let lens = sequences.iter().map(|&sequence| self.lens[sequence]).collect();
        let (options, restored) = (self.options, self.restored.clone());
        Ok(Self { layout, state, lens, options, stepped: self.stepped, restored })
    }

    /// Copies the sequences of several caches to a new cache, in this order, so that prompts with
    /// separate prefills continue as a batch. Each sequence keeps its length.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for no caches, and for caches whose configuration, heads, options or
    /// device differ from the first.
    pub fn join(caches: &[Self]) -> Result<Self> {
        let different = |index: usize, what: &str| {
            let what = format!("join: {what} of cache {index}");
            Error::Unsupported { what, why: "must be that of cache 0".to_string() }
        };
        let Some(first) = caches.first() else {
            let why = "there must be at least one".to_string();
            return Err(Error::Unsupported { what: "join of no caches".to_string(), why });
        };
        for (index, cache) in caches.iter().enumerate() {
            first.check_alike(cache).map_err(|what| different(index, what))?;
        }
        let lens: Vec<usize> = caches.iter().flat_map(|cache| cache.lens.clone()).collect();
        let shape = CacheShape { batch: lens.len(), ..first.layout.shape() };
        let layout = CacheLayout::new(first.layout.config(), shape)?;
        let parts = caches.iter().map(|cache| (&cache.layout, &cache.state));
        let state = State::join(&layout, parts);
        let stepped = caches.iter().any(|cache| cache.stepped);
        let (options, restored) = (first.options, first.restored.clone());
        Ok(Self { layout, options, state, lens, stepped, restored })
    }
}
