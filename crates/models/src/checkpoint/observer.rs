//! What a program is told of a load, and may refuse.

use std::{collections::BTreeMap, fmt};

use crate::{cache_config::ModelCacheConfig, error::Result, model::LanguageModel, spec::ModelSpec};

/// Who is told of a load while it goes on.
pub trait LoadObserver {
    /// The model is known, and nothing is allocated yet.
    ///
    /// # Errors
    ///
    /// An error ends the load.
    fn begin(&mut self, planned: &Planned<'_>) -> Result<()> {
        let _ = planned;
        Ok(())
    }

    /// All but the other layers has been read: the model with its first layer alone, from which a device can learn what
    /// it will have to compute ([`CompileAhead`](crate::CompileAhead)) while the rest is read.
    fn first_layer(&mut self, model: LanguageModel) {
        let _ = model;
    }

    /// So many of the weights' bytes have been read and are where they are to be.
    fn read(&mut self, bytes: usize) {
        let _ = bytes;
    }
}

/// A model that is about to be loaded.
#[derive(Debug)]
#[non_exhaustive]
pub struct Planned<'a> {
    /// Its sizes, layer by layer.
    pub spec: &'a ModelSpec,
    /// What its weights will take.
    pub weights: &'a WeightBytes,
    /// The cache that it was trained with, if its files say so.
    pub cache: Option<&'a ModelCacheConfig>,
}

impl<'a> Planned<'a> {
    /// A model of `spec` with these weights.
    pub fn new(
        spec: &'a ModelSpec,
        weights: &'a WeightBytes,
        cache: Option<&'a ModelCacheConfig>,
    ) -> Self {
        Self { spec, weights, cache }
    }
}

/// What the weights of a checkpoint take.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WeightBytes {
    /// Bytes in memory by the type they are kept in there, as `Q4K` or `f32`.
    pub by_type: BTreeMap<String, usize>,
    /// Bytes in the files.
    pub in_files: usize,
    /// Bytes in memory of all if what can stay packed did; `None` where it does, and where the
    /// device or the type asked for rules that out.
    pub packed: Option<usize>,
    /// The tensor with the most bytes that have to be in one buffer, as the files name it, and these: all of it, or a row
    /// of one that stays packed, of which there can be several buffers.
    pub largest: (String, usize),
    /// Bytes in memory of the projection to the vocabulary, and its numbers.
    pub head: (usize, usize),
    /// Bytes in memory of the token embedding, if nothing but single rows of it are read, and those of a row.
    pub looked_up: (usize, usize),
    /// The most rows of a matrix other than those of the vocabulary: the widest activation.
    pub widest: usize,
}

impl WeightBytes {
    /// Bytes that a step of one token reads: all weights, but of the token embedding a row. (All experts of a mixture
    /// count, and all of a table of positions.)
    pub fn bytes_per_token(&self) -> usize {
        let (table, row) = self.looked_up;
        self.total() - table + row
    }

    /// Bytes in memory of all.
    pub fn total(&self) -> usize {
        self.by_type.values().sum()
    }
}

/// An observer, or none.
#[derive(Default)]
pub(crate) struct Watcher {
    observer: Option<Box<dyn LoadObserver>>,
    /// Whether it knows the model.
    began: bool,
}

impl Watcher {
    pub(crate) fn new(observer: impl LoadObserver + 'static) -> Self {
        Self { observer: Some(Box::new(observer)), began: false }
    }

    pub(crate) fn begin(&mut self, planned: &Planned<'_>) -> Result<()> {
        self.began = true;
        self.observer.as_mut().map_or(Ok(()), |observer| observer.begin(planned))
    }

    pub(crate) fn first_layer(&mut self, model: impl FnOnce() -> LanguageModel) {
        if let Some(observer) = &mut self.observer {
            observer.first_layer(model());
        }
    }

    pub(crate) fn read(&mut self, bytes: usize) {
        // What is read to know the model is no part of its weights.
        if let Some(observer) = self.observer.as_mut().filter(|_| self.began) {
            observer.read(bytes);
        }
    }
}

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watcher").field("began", &self.began).finish_non_exhaustive()
    }
}
