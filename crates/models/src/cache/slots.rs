//! The sequences of a batch, in all layers at once.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_cubecl::KvCache;

use super::ModelCache;
use crate::{Error, Result};

impl ModelCache {
    /// A cache of the given sequences of the batch, in this order; see [`KvCache::select`].
    ///
    /// # Errors
    ///
    /// No sequence at all, or one that the batch does not have.
    pub fn select(&self, sequences: &[usize]) -> Result<Self> {
        let layers = self.layers.iter().map(|layer| layer.select(sequences));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let rope_tables = self.rope_tables.clone();
        Ok(Self { layers, rope_tables, batch: sequences.len(), ..*self })
    }

    /// One cache of the sequences of several, in this order; see [`KvCache::join`].
    ///
    /// # Errors
    ///
    /// No cache at all, and caches that are not like the first.
    pub fn join(caches: &[Self]) -> Result<Self> {
        let Some(first) = caches.first() else {
            return Err(Error::argument("caches", "none", "there must be at least one to join"));
        };
        caches.iter().try_for_each(|cache| first.check_like(cache))?;
        let join = |i: usize| {
            let layers: Vec<KvCache> = caches.iter().map(|cache| cache.layers[i].clone()).collect();
            KvCache::join(&layers)
        };
        let layers = (0..first.layers.len()).map(join).collect::<Result<Vec<_>, _>>()?;
        let batch = caches.iter().map(|cache| cache.batch).sum();
        Ok(Self { layers, rope_tables: first.rope_tables.clone(), batch, ..*first })
    }

    /// Forgets the tokens of one sequence, whose slot is then free; see [`KvCache::remove`].
    ///
    /// # Errors
    ///
    /// A sequence that the batch does not have or that holds no token.
    pub fn remove(&mut self, sequence: usize) -> Result<()> {
        Ok(self.layers.iter_mut().try_for_each(|layer| layer.remove(sequence))?)
    }

    /// Copies the one sequence of `cache` into a free slot; see [`KvCache::admit`].
    ///
    /// # Errors
    ///
    /// A slot that the batch does not have or that is not free, and a `cache` of another batch than 1, of no
    /// token, or not like this one. No sequence is then changed.
    pub fn admit(&mut self, sequence: usize, cache: &Self) -> Result<()> {
        self.check_like(cache)?;
        for i in 0..self.layers.len() {
            if let Err(error) = self.layers[i].admit(sequence, &cache.layers[i]) {
                // The slot was free in the layers before.
                self.layers[..i].iter_mut().try_for_each(|layer| layer.remove(sequence))?;
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Copies one sequence into a free slot; see [`KvCache::fork`].
    ///
    /// # Errors
    ///
    /// A sequence that the batch does not have, `from` one of no token, or `to` one that is not free.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<()> {
        Ok(self.layers.iter_mut().try_for_each(|layer| layer.fork(from, to))?)
    }

    /// Forgets all tokens of one sequence but the first `len`; see [`KvCache::truncate`].
    ///
    /// # Errors
    ///
    /// A sequence that the batch does not have, and a `len` above its tokens or below the
    /// [shortest](Self::shortest). No layer is then changed.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<()> {
        let shortest = |i: &usize| self.layers[*i].shortest(sequence);
        // The layer that goes back least comes first: if it can, all can.
        let least = (0..self.layers.len()).max_by_key(|i| shortest(i).unwrap_or(0));
        let Some(least) = least else { return Ok(()) };
        self.layers[least].truncate(sequence, len)?;
        let others = self.layers.iter_mut().enumerate().filter(|(i, _)| *i != least);
        Ok(others.map(|(_, layer)| layer).try_for_each(|layer| layer.truncate(sequence, len))?)
    }

    /// The fewest tokens that [`truncate`](Self::truncate) can cut a sequence back to.
    ///
    /// # Errors
    ///
    /// A sequence that the batch does not have.
    pub fn shortest(&self, sequence: usize) -> Result<usize> {
        let shortest = |most: usize, layer: &KvCache| Ok(most.max(layer.shortest(sequence)?));
        self.layers.iter().try_fold(0, shortest)
    }

    /// Cuts a sequence back to its first `len` tokens, or to as many of them as leave exactly the
    /// cache that was never given the others, and returns how many these are; see
    /// [`KvCache::cut_back`].
    ///
    /// # Errors
    ///
    /// Those of [`exact`](Self::exact).
    pub fn cut_back(&mut self, sequence: usize, len: usize) -> Result<usize> {
        let exact = self.exact(sequence, len)?;
        for layer in &mut self.layers {
            layer.cut_back(sequence, exact)?;
        }
        Ok(exact)
    }

    /// The largest number of tokens up to `len` at which [`cut_back`](Self::cut_back) leaves all
    /// layers exactly; see [`KvCache::exact`].
    ///
    /// # Errors
    ///
    /// A sequence that the batch does not have, and a `len` above its tokens.
    pub fn exact(&self, sequence: usize, len: usize) -> Result<usize> {
        let mut exact = len;
        loop {
            let shorter = |len: usize, layer: &KvCache| Ok(layer.exact(sequence, len)?);
            let shortest = self.layers.iter().try_fold(exact, shorter);
            match shortest {
                Ok(len) if len < exact => exact = len,
                ended => return ended,
            }
        }
    }

    /// Checks that layers and limits of `other` are those of this cache; what each layer stores is compared
    /// by the layers.
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

    /// Checks that of a pass of `seq` tokens `tokens` more fit each of `batch` sequences, before any layer
    /// changes.
    pub(crate) fn check_ragged(&self, batch: usize, seq: usize, tokens: &[usize]) -> Result<()> {
        if seq == 0 {
            return Err(Error::argument("seq", 0, "a pass needs at least one token"));
        }
        for (field, n) in [("batch", batch), ("tokens", tokens.len())] {
            if n != self.batch {
                let rule = format!("must be for the {} sequences of the cache", self.batch);
                return Err(Error::argument(field, n, rule));
            }
        }
        for (sequence, (&added, &cached)) in tokens.iter().zip(self.lens()).enumerate() {
            let value = format!("{added} of sequence {sequence}");
            if added > seq {
                return Err(Error::argument("tokens", value, format!("the pass has {seq}")));
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

    /// The positions of the next `seq` tokens of every sequence, `[batch * seq]` i32; those past the room are
    /// its last, since they take no part.
    pub(crate) fn positions(&self, seq: usize, device: &Device) -> Tensor<1, Int> {
        let last = self.room().saturating_sub(1);
        let position = |start: usize| (start..start + seq).map(|at| at.min(last) as i32);
        let positions: Vec<i32> = self.lens().iter().flat_map(|&len| position(len)).collect();
        let shape = [positions.len()];
        Tensor::from_data(TensorData::new(positions, shape), (device, DType::I32))
    }
}
