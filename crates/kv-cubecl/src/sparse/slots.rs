//! The sequences of a [`SparseCache`]: select, join, remove, admit, fork, truncate and resize.

use burn::tensor::{Device, Int, Tensor};

use super::{SparseCache, SparseConfig, cache::Compressing, store::RowStore};
use crate::{
    Error, Result,
    error::invalid,
    sequences::{check_free, check_holds, check_sequence},
};

/// A tensor of a cache as it is saved.
#[derive(Clone, Debug)]
pub struct SparsePart {
    /// Its name, such as `entries.codes`.
    pub name: &'static str,
    /// The tensor.
    pub tensor: SparseTensor,
}

/// A tensor of codes or of floats.
#[derive(Clone, Debug)]
pub enum SparseTensor {
    /// u32 words of one axis.
    Codes(Tensor<1, Int>),
    /// Rows of floats, `[batch, rows, width]`.
    Floats(Tensor<3>),
}

/// The names of a store's tensors: codes and floats.
pub(super) const WINDOW: [&str; 2] = ["window.codes", "window"];
pub(super) const ENTRIES: [[&str; 2]; 3] = [
    ["entries.content.codes", "entries.content"],
    ["entries.gate.codes", "entries.gate"],
    ["entries.codes", "entries"],
];
pub(super) const KEYS: [[&str; 2]; 3] = [
    ["keys.content.codes", "keys.content"],
    ["keys.gate.codes", "keys.gate"],
    ["keys.codes", "keys"],
];

impl Compressing {
    fn stores(&self) -> [&RowStore; 3] {
        [&self.content, &self.gate, &self.rows]
    }

    fn stores_mut(&mut self) -> [&mut RowStore; 3] {
        [&mut self.content, &mut self.gate, &mut self.rows]
    }
}

impl SparseCache {
    /// Returns all stores, with the names of their tensors.
    fn stores(&self) -> Vec<([&'static str; 2], &RowStore)> {
        let mut stores = vec![(WINDOW, &self.window)];
        for (part, names) in [(&self.entries, ENTRIES), (&self.keys, KEYS)] {
            stores.extend(names.into_iter().zip(part.iter().flat_map(Compressing::stores)));
        }
        stores
    }

    fn stores_mut(&mut self) -> Vec<&mut RowStore> {
        let parts = [&mut self.entries, &mut self.keys];
        let compressing = parts.into_iter().flatten().flat_map(Compressing::stores_mut);
        [&mut self.window].into_iter().chain(compressing).collect()
    }

    /// Returns a cache whose stores are `f` of the stores of this one.
    fn map(&self, lens: Vec<usize>, mut f: impl FnMut(usize, &RowStore) -> RowStore) -> Self {
        let mut cache = Self { lens, ..self.clone() };
        let all = self.stores();
        for (i, store) in cache.stores_mut().into_iter().enumerate() {
            *store = f(i, all[i].1);
        }
        cache
    }

    /// Returns a cache of the given sequences, in this order, in new memory.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] without a sequence, and for one that the batch does not have.
    pub fn select(&self, sequences: &[usize]) -> Result<Self> {
        if sequences.is_empty() {
            return Err(invalid("sequences", "none", "must be at least one"));
        }
        sequences
            .iter()
            .try_for_each(|&sequence| check_sequence("sequence", sequence, self.lens.len()))?;
        let lens = sequences.iter().map(|&sequence| self.lens[sequence]).collect();
        Ok(self.map(lens, |_, store| store.select(sequences)))
    }

    /// Joins the sequences of several caches, in this order.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] without a cache, and [`Error::Unsupported`] for caches that differ
    /// in more than their sequences.
    pub fn join(caches: &[Self]) -> Result<Self> {
        let Some(first) = caches.first() else {
            return Err(invalid("caches", "none", "must be at least one"));
        };
        caches.iter().try_for_each(|cache| first.check_alike("join", cache))?;
        let lens = caches.iter().flat_map(|cache| cache.lens.iter().copied()).collect();
        let stores: Vec<_> = caches.iter().map(Self::stores).collect();
        Ok(first.map(lens, |i, _| {
            let parts: Vec<_> = stores.iter().map(|stores| stores[i].1).collect();
            RowStore::join(&parts)
        }))
    }

    /// Removes all tokens of one sequence, which frees its slot.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a sequence that the batch does not have or that holds no token.
    pub fn remove(&mut self, sequence: usize) -> Result<()> {
        check_holds(sequence, &self.lens)?;
        self.lens[sequence] = 0;
        Ok(())
    }

    /// Copies the only sequence of `cache` into a free slot.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a slot that does not exist or is not free, and for a `cache`
    /// that is empty or has another batch than 1. [`Error::Unsupported`] for a `cache` of another
    /// configuration or device. On failure the cache is unchanged.
    pub fn admit(&mut self, sequence: usize, cache: &Self) -> Result<()> {
        check_free("sequence", sequence, &self.lens)?;
        if cache.lens.len() != 1 {
            let rule = "a cache that is admitted must be of 1 sequence";
            return Err(invalid("batch", cache.lens.len(), rule));
        }
        self.check_alike("admit", cache)?;
        check_holds(0, &cache.lens)?;
        let from = cache.stores();
        for (to, (_, from)) in self.stores_mut().into_iter().zip(from) {
            to.put_sequence(sequence, from);
        }
        self.lens[sequence] = cache.lens[0];
        Ok(())
    }

    /// Copies one sequence into a free slot; both then continue independently.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a sequence that the batch does not have, if `from` is empty, or
    /// if `to` is not free. On failure the cache is unchanged.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<()> {
        check_holds(from, &self.lens)?;
        check_free("to", to, &self.lens)?;
        let alone = self.select(&[from])?;
        self.admit(to, &alone)
    }

    /// Adds `tokens` that calls at device positions have appended to the length of each sequence.
    ///
    /// # Errors
    /// [`Error::CapacityExceeded`] if they do not fit. On failure the cache is unchanged.
    pub fn advance(&mut self, tokens: usize) -> Result<()> {
        let (len, capacity) = (self.len(), self.config.capacity);
        if len + tokens > capacity {
            return Err(Error::CapacityExceeded { len, added: tokens, capacity });
        }
        self.lens.iter_mut().for_each(|len| *len += tokens);
        Ok(())
    }

    /// Returns the smallest length that [`truncate`](Self::truncate) accepts for a sequence: recent
    /// tokens and open windows must still be stored.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a sequence that the batch does not have.
    pub fn shortest(&self, sequence: usize) -> Result<usize> {
        check_sequence("sequence", sequence, self.lens.len())?;
        let (now, window) = (self.lens[sequence], &self.config.sliding_window);
        // The next token sees the `window - 1` tokens before it.
        let by_window = match now.checked_sub(self.window.layout.slots) {
            Some(lost) if lost > 0 => lost + window - 1,
            _ => 0,
        };
        let by_entries = self.entries.as_ref().map_or(0, |entries| {
            let (span, ratio) = (entries.compression.span(), entries.compression.ratio);
            match now.checked_sub(entries.content.layout.slots) {
                // The next entry depends on `span - ratio` tokens before its window.
                Some(lost) if lost > 0 => (lost + span - ratio).div_ceil(ratio) * ratio,
                _ => 0,
            }
        });
        Ok(by_window.max(by_entries).min(now))
    }

    /// Removes all tokens of one sequence after the first `len`. The cache is then as if it had
    /// never held them.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a sequence that the batch does not have, and for a `len` above
    /// its tokens or below [`shortest`](Self::shortest). On failure the cache is unchanged.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<()> {
        let (shortest, now) = (self.shortest(sequence)?, self.lens.get(sequence).copied());
        let now = now.unwrap_or(0);
        if len > now {
            let rule = format!("must be at most the {now} tokens of sequence {sequence}");
            return Err(invalid("len", len, rule));
        }
        if len < shortest && len > 0 {
            let rule = format!(
                "must be at least {shortest} for sequence {sequence} of {now} tokens, or 0: \
earlier tokens are compressed; raise rollback"
            );
            return Err(invalid("len", len, rule));
        }
        self.lens[sequence] = len;
        Ok(())
    }

    /// Returns the largest number of tokens up to `len` that [`truncate`](Self::truncate) can cut
    /// the sequence back to.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a sequence that the batch does not have, and for a `len` above
    /// its tokens.
    pub fn exact(&self, sequence: usize, len: usize) -> Result<usize> {
        let shortest = self.shortest(sequence)?;
        if len > self.lens[sequence] {
            let rule = format!("must be at most the {} tokens held", self.lens[sequence]);
            return Err(invalid("len", len, rule));
        }
        Ok(if len >= shortest { len } else { 0 })
    }

    /// Returns a cache of another capacity with the same tokens, in new memory.
    ///
    /// # Errors
    /// [`Error::CapacityExceeded`] if the cache holds more tokens, and the errors of
    /// [`new`](Self::new).
    pub fn resized(&self, capacity: usize) -> Result<Self> {
        let len = self.len();
        if len > capacity {
            return Err(Error::CapacityExceeded { len: 0, added: len, capacity });
        }
        let config = SparseConfig { capacity, ..self.config };
        let empty = Self::new(&config, self.lens.len(), &self.device())?;
        let new = empty.stores();
        let slots: Vec<_> = new.iter().map(|(_, store)| store.layout.slots).collect();
        let mut cache = self.map(self.lens.clone(), |i, store| store.resized(slots[i]));
        cache.config = config;
        Ok(cache)
    }

    /// Returns all tensors by name, for saving.
    pub fn parts(&self) -> Vec<SparsePart> {
        let mut parts = vec![];
        for ([codes, floats], store) in self.stores() {
            if store.layout.sequence_words() > 0 {
                let tensor = SparseTensor::Codes(store.codes());
                parts.push(SparsePart { name: codes, tensor });
            }
            if store.layout.floats() > 0 {
                parts.push(SparsePart {
                    name: floats,
                    tensor: SparseTensor::Floats(store.floats()),
                });
            }
        }
        parts
    }

    /// Makes a cache of the tensors of [`parts`](Self::parts), which `part` returns by name. Its
    /// second argument is true for code words, and false for rows of floats.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new) and of `part`; [`Error::Shape`] for a tensor that does not
    /// fit the configuration; [`Error::InvalidConfig`] for more tokens than the capacity.
    pub fn from_parts<E: From<Error>>(
        config: &SparseConfig,
        lens: Vec<usize>,
        device: &Device,
        mut part: impl FnMut(&'static str, bool) -> core::result::Result<SparseTensor, E>,
    ) -> core::result::Result<Self, E> {
        let mut cache = Self::new(config, lens.len(), device)?;
        if let Some(len) = lens.iter().find(|&&len| len > config.capacity) {
            let rule = format!("must be at most the capacity of {}", config.capacity);
            return Err(invalid("lens", len, rule).into());
        }
        let names: Vec<_> = cache.stores().into_iter().map(|(names, _)| names).collect();
        for ([codes, floats], store) in names.into_iter().zip(cache.stores_mut()) {
            let layout = store.layout;
            let other_kind = |tensor, shape: Vec<usize>, rule: &str| Error::Shape {
                op: "from_parts",
                tensor,
                shape,
                rule: rule.to_string(),
            };
            let codes = match layout.sequence_words() {
                0 => store.codes(),
                _ => match part(codes, true)? {
                    SparseTensor::Codes(words) => words,
                    SparseTensor::Floats(rows) => {
                        let shape = rows.dims().to_vec();
                        return Err(other_kind(codes, shape, "must be code words").into());
                    }
                },
            };
            let floats = match layout.floats() {
                0 => store.floats(),
                _ => match part(floats, false)? {
                    SparseTensor::Floats(rows) => rows,
                    SparseTensor::Codes(words) => {
                        let shape = words.dims().to_vec();
                        return Err(other_kind(floats, shape, "must be rows of floats").into());
                    }
                },
            };
            *store = RowStore::checked(layout, codes, floats)?;
        }
        cache.lens = lens;
        Ok(cache)
    }

    /// Checks that sequences of `other` can be copied to this cache.
    fn check_alike(&self, op: &str, other: &Self) -> Result<()> {
        let unlike = |what: &str| Error::Unsupported {
            what: format!("{op}: {what} of another cache"),
            why: "must equal the one of the cache that it joins".into(),
        };
        if self.config != other.config {
            return Err(unlike("configuration"));
        }
        if self.device() != other.device() {
            return Err(unlike("device"));
        }
        Ok(())
    }
}
