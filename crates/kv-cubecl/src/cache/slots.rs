//! Reuses the slots of a batch: removes sequences, and admits or forks others.

use burn::tensor::{Int, Tensor};

use super::{KvCache, state::State};
use crate::{
    CacheShape, Error, Result,
    error::invalid,
    layout::{CacheLayout, Side, Sides},
    sequences::{check_free, check_holds},
};

impl KvCache {
    /// Removes all tokens of one sequence, which frees its slot for [`admit`](Self::admit),
    /// [`fork`](Self::fork) or new tokens. The memory of an empty sequence is never read.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a sequence that the batch does not have or that holds no token.
    pub fn remove(&mut self, sequence: usize) -> Result<()> {
        check_holds(sequence, &self.lens)?;
        self.lens[sequence] = 0;
        Ok(())
    }

    /// Copies the only sequence of `cache` into a free slot, for example after the prefill of a
    /// prompt.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a slot that does not exist or is not free, and for a `cache`
    /// that is empty or has another batch than 1. [`Error::Unsupported`] for a `cache` whose
    /// configuration, heads, options or device differ. On failure the cache is unchanged.
    pub fn admit(&mut self, sequence: usize, cache: &Self) -> Result<()> {
        check_free("sequence", sequence, &self.lens)?;
        let batch = cache.lens.len();
        if batch != 1 {
            return Err(invalid("batch", batch, "a cache that is admitted must be of 1 sequence"));
        }
        let unlike = |what: &str| Error::Unsupported {
            what: format!("admit: {what} of the cache that is admitted"),
            why: "must be that of the cache that it joins".to_string(),
        };
        self.check_alike(cache).map_err(unlike)?;
        check_holds(0, &cache.lens)?;
        self.state.put(&self.layout, sequence, &cache.state);
        self.lens[sequence] = cache.lens[0];
        self.stepped |= cache.stepped;
        Ok(())
    }

    /// Copies one sequence into a free slot; both then continue independently. The memory of the
    /// sequence is copied at once, whereas a clone of the cache copies memory when it is written.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a sequence that the batch does not have, if `from` is empty, or
    /// if `to` is not free. On failure the cache is unchanged.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<()> {
        check_holds(from, &self.lens)?;
        check_free("to", to, &self.lens)?;
        let alone = self.alone(from, self.layout_of_one()?);
        self.state.put(&self.layout, to, &alone.state);
        self.lens[to] = self.lens[from];
        Ok(())
    }

    /// Checks that sequences of `other` can be copied to this cache. The error names the first
    /// difference.
    pub(super) fn check_alike(&self, other: &Self) -> Result<(), &'static str> {
        let heads = |cache: &Self| CacheShape { batch: 1, ..cache.layout.shape() };
        let parts = [
            ("configuration", other.layout.config() == self.layout.config()),
            ("heads", heads(other) == heads(self)),
            ("options", other.options == self.options),
            ("device", other.device() == self.device()),
        ];
        parts.into_iter().try_for_each(|(what, same)| if same { Ok(()) } else { Err(what) })
    }
}

impl State {
    /// Overwrites one sequence of a cache with the layout `layout`. `one` has the tensors of a
    /// cache of one sequence that is otherwise alike. Writes in place if the tensors are not
    /// shared.
    pub(super) fn put(&mut self, layout: &CacheLayout, sequence: usize, one: &Self) {
        let slices = layout.slices() / layout.shape().batch;
        let assign = |words: Tensor<1, Int>, side: Side| {
            let n = slices * layout.slice_words(side);
            match n {
                0 => words,
                // The tensor may have more words than the sequence.
                _ => words.slice_assign(
                    sequence * n..(sequence + 1) * n,
                    one.packed_words(side).narrow(0, 0, n),
                ),
            }
        };
        self.change(|Sides { keys, values }, floats| {
            let [_, heads, rows, width] = floats.dims();
            let all = [sequence..sequence + 1, 0..heads, 0..rows, 0..width];
            let floats = floats.slice_assign(all, one.floats());
            let (keys, values) = (assign(keys, Side::Keys), assign(values, Side::Values));
            (Sides { keys, values }, floats)
        });
    }
}
