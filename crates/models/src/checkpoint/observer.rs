//! Observers of a load, and the sizes that they receive.

use std::{collections::BTreeMap, fmt};

use crate::{cache_config::ModelCacheConfig, error::Result, model::LanguageModel, spec::ModelSpec};

/// Observes a load.
pub trait LoadObserver {
    /// Called when the sizes of the model are known and nothing has been allocated.
    ///
    /// # Errors
    /// An error ends the load.
    fn begin(&mut self, planned: &Planned<'_>) -> Result<()> {
        let _ = planned;
        Ok(())
    }

    /// Called after each layer with its index; `model` makes a model that has only this layer. A
    /// device can compile its kernels while the other layers are read
    /// ([`CompileAhead`](crate::CompileAhead)). Not called for the only layer of a model, and for
    /// layers that depend on others.
    fn layer(&mut self, index: usize, model: &dyn Fn() -> LanguageModel) {
        let _ = (index, model);
    }

    /// Called after each tensor with the number of its bytes.
    fn read(&mut self, bytes: usize) {
        let _ = bytes;
    }

    /// Called when all weights are read. If it is not called before the observer is dropped, the
    /// load has failed.
    fn end(&mut self) {}
}

/// A model that is about to be loaded.
#[derive(Debug)]
#[non_exhaustive]
pub struct Planned<'a> {
    /// The sizes of every layer.
    pub spec: &'a ModelSpec,
    /// The sizes of its weights.
    pub weights: &'a WeightBytes,
    /// The cache that the model was trained with, if its files name one.
    pub cache: Option<&'a ModelCacheConfig>,
}

impl<'a> Planned<'a> {
    /// Creates the description of a model.
    pub fn new(
        spec: &'a ModelSpec,
        weights: &'a WeightBytes,
        cache: Option<&'a ModelCacheConfig>,
    ) -> Self {
        Self { spec, weights, cache }
    }
}

/// Sizes of the weights of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WeightBytes {
    /// Bytes in memory by the type in memory, such as `Q4K` or `f32`.
    pub by_type: BTreeMap<String, usize>,
    /// Bytes in the files.
    pub in_files: usize,
    /// Bytes in memory if all weights that can stay packed did. `None` if they already do, or if
    /// the device or the requested type does not allow it.
    pub packed: Option<usize>,
    /// The tensor with the largest single buffer, by its name in the files, and the bytes of that
    /// buffer. A packed tensor can be divided, so only one of its rows counts.
    pub largest: (String, usize),
    /// Bytes in memory of the projection to the vocabulary, and its bytes in
    /// [int4](crate::LoadOptions::head); `None` if it cannot be quantized as it is loaded.
    pub head: (usize, Option<usize>),
    /// Bytes in memory of the token embedding and of one row; the first is 0 if a tied head reads
    /// all of it.
    pub looked_up: (usize, usize),
    /// The most rows of a matrix, except for matrices over the vocabulary: the widest activation.
    pub widest: usize,
}

impl WeightBytes {
    /// Returns the bytes that one decode step reads: all weights, but one row of the token
    /// embedding. All experts of a mixture and the whole table of positions count.
    pub fn bytes_per_token(&self) -> usize {
        let (table, row) = self.looked_up;
        self.total() - table + row
    }

    /// Returns the bytes of all weights in memory.
    pub fn total(&self) -> usize {
        self.by_type.values().sum()
    }
}

/// An optional observer.
#[derive(Default)]
pub(crate) struct Watcher {
    observer: Option<Box<dyn LoadObserver>>,
    /// `true` once the observer received the sizes.
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

    pub(crate) fn layer(&mut self, index: usize, model: &dyn Fn() -> LanguageModel) {
        if let Some(observer) = &mut self.observer {
            observer.layer(index, model);
        }
    }

    pub(crate) fn end(&mut self) {
        if let Some(observer) = &mut self.observer {
            observer.end();
        }
    }

    pub(crate) fn read(&mut self, bytes: usize) {
        // Tensors read before `begin` determine the sizes and are not weights.
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
