//! A model on its way into memory: whether it fits, and how far it is.

use std::{
    cell::RefCell,
    rc::Rc,
    time::{Duration, Instant},
};

use burn::tensor::Device;
use indicatif::ProgressBar;
use kv_cli::load_bar;
use kv_cubecl::{Flex, KvCacheConfig, Target};
use kv_models::{
    CompileAhead, GenerateOptions, LanguageModel, LoadObserver, MemoryLimit, ModelCacheConfig,
    ModelSpec, Planned, Usage, WeightBytes,
};

/// What a command is going to do with a model.
#[derive(Clone, Debug)]
pub(crate) struct Need {
    /// The caches that are allocated one after the other; without any, that of the model's files, else float.
    pub(crate) caches: Vec<ModelCacheConfig>,
    /// Tokens that they are allocated for, if the model has as many positions.
    pub(crate) capacity: usize,
    /// Whether it is so many whatever the model has.
    pub(crate) exact: bool,
    /// Sequences.
    pub(crate) batch: usize,
    /// Tokens that pass through the model together; by default those of a chunk of a prompt.
    pub(crate) pass: Option<usize>,
    /// Whether texts are generated with the first of the caches, for which kernels are compiled during the load.
    pub(crate) generates: bool,
}

impl Need {
    /// Caches of one sequence of so many tokens.
    pub(crate) fn new(
        caches: impl IntoIterator<Item = impl Into<ModelCacheConfig>>,
        capacity: usize,
    ) -> Self {
        let caches = caches.into_iter().map(Into::into).collect();
        Self { caches, capacity, exact: false, batch: 1, pass: None, generates: false }
    }

    fn usages(
        &self,
        spec: &ModelSpec,
        own: Option<&ModelCacheConfig>,
        device: &Device,
    ) -> Vec<Usage> {
        let mut caches = self.caches.clone();
        if caches.is_empty() {
            caches.push(own.cloned().unwrap_or_else(|| KvCacheConfig::float().into()));
        }
        let most = if self.exact { usize::MAX } else { spec.max_positions };
        let capacity = self.capacity.min(most);
        let usage = |cache: ModelCacheConfig| {
            let usage = Usage::new(cache.with_capacity(capacity)).with_batch(self.batch);
            match self.pass {
                Some(pass) => usage.with_pass(pass.min(spec.max_positions)),
                // What is not generated passes in chunks that no device changes.
                None if self.generates => {
                    usage.with_pass(GenerateOptions::suiting_chunk(spec, device))
                }
                None => usage,
            }
        };
        caches.into_iter().map(usage).collect()
    }
}

/// The memory that there was before the model was loaded, and what its weights take of it.
#[derive(Clone, Debug)]
pub(crate) struct Room {
    limit: MemoryLimit,
    weights: Rc<RefCell<WeightBytes>>,
}

impl Room {
    pub(crate) fn new(limit: MemoryLimit) -> Self {
        Self { limit, weights: Rc::default() }
    }

    /// Checks that there is room for a cache, before it is allocated.
    pub(crate) fn check(&self, spec: &ModelSpec, usage: &Usage) -> kv_models::Result<()> {
        Planned::new(spec, &self.weights.borrow(), None).check(usage, &self.limit)
    }
}

/// What the loader tells, for a check and a bar.
pub(crate) struct Loading {
    need: Need,
    room: Room,
    start: Instant,
    bytes: usize,
    bar: Option<ProgressBar>,
    device: Device,
    /// The cache that kernels are compiled for.
    cache: Option<KvCacheConfig>,
    ahead: Option<CompileAhead>,
}

/// A load that takes no longer has no bar.
const SHORT: Duration = Duration::from_millis(700);

impl Loading {
    pub(crate) fn new(need: Need, room: Room, device: &Device) -> Self {
        let (start, device) = (Instant::now(), device.clone());
        Self { need, room, start, bytes: 0, bar: None, device, cache: None, ahead: None }
    }
}

impl LoadObserver for Loading {
    fn begin(&mut self, planned: &Planned<'_>) -> kv_models::Result<()> {
        self.room.weights.replace(planned.weights.clone());
        for usage in self.need.usages(planned.spec, planned.cache, &self.device) {
            planned.check(&usage, &self.room.limit)?;
            // Of the first layer, since that is the one there is when kernels are compiled.
            self.cache.get_or_insert_with(|| usage.cache.layer(planned.spec, 0));
        }
        Ok(())
    }

    fn first_layer(&mut self, model: LanguageModel) {
        let generates = self.need.generates && !Flex::hosts(&self.device);
        let cache = self.cache.filter(|_| generates);
        self.ahead = cache.map(|cache| CompileAhead::start(model, cache, &self.device));
    }

    fn read(&mut self, bytes: usize) {
        self.bytes += bytes;
        if self.start.elapsed() > SHORT {
            let total = self.room.weights.borrow().in_files;
            let bar =
                self.bar.get_or_insert_with(|| load_bar(total).with_elapsed(self.start.elapsed()));
            bar.set_position(self.bytes as u64);
        }
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
