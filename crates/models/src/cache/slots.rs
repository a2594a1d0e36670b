//! The sequences of a batch, in all layers at once.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::{LayerCache, ModelCache};
use crate::error::{Error, Result};

impl ModelCache {
    /// Returns a cache of the given sequences, in this order; see
    /// [`KvCache::select`](kv_cubecl::KvCache::select).
    ///
    /// # Errors
    /// Fails without a sequence, and for one that the batch does not have.
    pub fn select(&self, sequences: &[usize]) -> Result<Self> {
        let layers = self.layers.iter().map(|layer| layer.select(sequences));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let rope_tables = self.rope_tables.clone();
        Ok(Self {
            layers,
            rope_tables,
            places: self.places.clone(),
            batch: sequences.len(),
            ..*self
        })
    }

    /// Joins the sequences of several caches, in this order; see
    /// [`KvCache::join`](kv_cubecl::KvCache::join).
    ///
    /// # Errors
    /// Fails without a cache, and for caches that differ from the first in more than their
    /// sequences.
    pub fn join(caches: &[Self]) -> Result<Self> {
        let Some(first) = caches.first() else {
            return Err(Error::argument("caches", "none", "must be at least one cache"));
        };
        caches.iter().try_for_each(|cache| first.check_like(cache))?;
        let join = |i: usize| LayerCache::join(caches.iter().map(|cache| &cache.layers[i]));
        let layers = (0..first.layers.len()).map(join).collect::<Result<Vec<_>, _>>()?;
        let batch = caches.iter().map(|cache| cache.batch).sum();
        Ok(Self {
            layers,
            rope_tables: first.rope_tables.clone(),
            places: first.places.clone(),
            batch,
            ..*first
        })
    }

    /// Removes the tokens of one sequence and frees its slot; see
    /// [`KvCache::remove`](kv_cubecl::KvCache::remove).
    ///
    /// # Errors
    /// Fails for a sequence that the batch does not have or that holds no token.
    pub fn remove(&mut self, sequence: usize) -> Result<()> {
        self.layers.iter_mut().try_for_each(|layer| layer.remove(sequence))
    }

    /// Copies the one sequence of `cache` into a free slot; see
    /// [`KvCache::admit`](kv_cubecl::KvCache::admit).
    ///
    /// # Errors
    /// Fails for a slot that the batch does not have or that is not free, and for a `cache` of
    /// another batch than 1, without tokens, or unlike this one. No sequence is then changed.
    pub fn admit(&mut self, sequence: usize, cache: &Self) -> Result<()> {
        self.check_like(cache)?;
        for i in 0..self.layers.len() {
            if let Err(error) = self.layers[i].admit(sequence, &cache.layers[i]) {
                // The slot was free in the layers before this one.
                self.layers[..i].iter_mut().try_for_each(|layer| layer.remove(sequence))?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Copies one sequence into a free slot; see [`KvCache::fork`](kv_cubecl::KvCache::fork).
    ///
    /// # Errors
    /// Fails for a sequence that the batch does not have, for `from` without tokens, and for `to`
    /// that is not free.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<()> {
        self.layers.iter_mut().try_for_each(|layer| layer.fork(from, to))
    }

    /// Removes all tokens of one sequence after the first `len`; see
    /// [`KvCache::truncate`](kv_cubecl::KvCache::truncate).
    ///
    /// # Errors
    /// Fails for a sequence that the batch does not have, and for a `len` above its tokens or below
    /// [`shortest`](Self::shortest). No layer is then changed.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<()> {
        let layers = &self.layers;
        let shortest = |i: &usize| {
            (layers[*i].refuses(sequence, len), layers[*i].shortest(sequence).unwrap_or(0))
        };
        // The layer with the largest minimum comes first: if it can be truncated, all can.
        let least = (0..layers.len()).max_by_key(shortest);
        let Some(least) = least else { return Ok(()) };
        self.layers[least].truncate(sequence, len)?;
        let others = self.layers.iter_mut().enumerate().filter(|(i, _)| *i != least);
        others.map(|(_, layer)| layer).try_for_each(|layer| layer.truncate(sequence, len))
    }

    /// Returns the fewest tokens that [`truncate`](Self::truncate) can cut a sequence back to.
    ///
    /// # Errors
    /// Fails for a sequence that the batch does not have.
    pub fn shortest(&self, sequence: usize) -> Result<usize> {
        let shortest = |most: usize, layer: &LayerCache| Ok(most.max(layer.shortest(sequence)?));
        self.layers.iter().try_fold(0, shortest)
    }

    /// Cuts a sequence back to `len` tokens, or to the largest smaller number that is exact, and
    /// returns that number. The cache then equals one that never held the other tokens; see
    /// [`KvCache::cut_back`](kv_cubecl::KvCache::cut_back).
    ///
    /// # Errors
    /// Fails as [`exact`](Self::exact) does.
    pub fn cut_back(&mut self, sequence: usize, len: usize) -> Result<usize> {
        let exact = self.exact(sequence, len)?;
        for layer in &mut self.layers {
            layer.cut_back(sequence, exact)?;
        }
        Ok(exact)
    }

    /// Returns the largest number of tokens up to `len` that [`cut_back`](Self::cut_back) leaves
    /// exact in all layers; see [`KvCache::exact`](kv_cubecl::KvCache::exact).
    ///
    /// # Errors
    /// Fails for a sequence that the batch does not have, and for a `len` above its tokens.
    pub fn exact(&self, sequence: usize, len: usize) -> Result<usize> {
        let mut exact = len;
        loop {
            let shorter = |len: usize, layer: &LayerCache| layer.exact(sequence, len);
            let shortest = self.layers.iter().try_fold(exact, shorter);
            match shortest {
                Ok(len) if len < exact => exact = len,
                ended => return ended,
            }
        }
    }

    /// Checks that `other` has as many layers and the same limits. The layers compare their
    /// configurations.
    fn check_like(&self, other: &Self) -> Result<()> {
        let sizes = |cache: &Self| (cache.layers.len(), cache.capacity, cache.max_positions);
        let (ours, theirs) = (sizes(self), sizes(other));
        if ours == theirs {
            return Ok(());
        }
        let value = format!("{} layers, capacity {}, {} positions", theirs.0, theirs.1, theirs.2);
        let rule = format!("must be {}, {} and {} as in the other", ours.0, ours.1, ours.2);
        Err(Error::argument("cache", value, rule))
    }

    /// Checks that `tokens` more tokens, at most `seq`, fit into each of `batch` sequences, before
    /// any layer changes.
    pub(crate) fn check_ragged(&self, batch: usize, seq: usize, tokens: &[usize]) -> Result<()> {
        if seq == 0 {
            return Err(Error::argument("seq", 0, "must be at least 1"));
        }
        for (field, n) in [("batch", batch), ("tokens", tokens.len())] {
            if n != self.batch {
                let rule = format!("the cache has {} sequences", self.batch);
                return Err(Error::argument(field, n, rule));
            }
        }
        for (sequence, (&added, &cached)) in tokens.iter().zip(self.lens()).enumerate() {
            let value = format!("{added} of sequence {sequence}");
            if added > seq {
                return Err(Error::argument("tokens", value, format!("must be at most seq {seq}")));
            }
            for (name, limit) in
                [("max_positions", self.max_positions), ("capacity", self.capacity)]
            {
                if cached + added > limit {
                    let rule = format!("it holds {cached} tokens, and {name} is {limit}");
                    return Err(Error::argument("tokens", value, rule));
                }
            }
        }
        Ok(())
    }

    /// Returns the positions of the next `seq` tokens of every sequence, `[batch * seq]` i32.
    /// Padding beyond the capacity gets the last position.
    pub(crate) fn positions(&self, seq: usize, device: &Device) -> Tensor<1, Int> {
        let last = self.room().saturating_sub(1);
        let position = |start: usize| (start..start + seq).map(|at| at.min(last) as i32);
        let positions: Vec<i32> = self.lens().iter().flat_map(|&len| position(len)).collect();
        let shape = [positions.len()];
        Tensor::from_data(TensorData::new(positions, shape), (device, DType::I32))
    }
}
