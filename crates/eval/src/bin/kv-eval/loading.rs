//! Loads models after checking that they fit into memory, and shows the progress.

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

/// The memory that a command needs besides weights: its caches and its forward passes.
#[derive(Clone, Debug)]
pub(crate) struct MemoryRequest {
    /// The caches, allocated one at a time. Empty means the cache that the model's files name, or
    /// else float.
    pub(crate) caches: Vec<ModelCacheConfig>,
    /// Capacity of each cache in tokens, clamped to the model's positions unless `exact`.
    pub(crate) capacity: usize,
    /// Do not clamp the capacity to max_position_embeddings.
    pub(crate) exact: bool,
    /// Number of sequences.
    pub(crate) batch: usize,
    /// Tokens processed in one forward pass; `None` for one chunk of prefill.
    pub(crate) pass: Option<usize>,
    /// Compile the kernels of the first cache during the load, to generate text with it.
    pub(crate) generates: bool,
}

impl MemoryRequest {
    /// Requests `caches` of one sequence with this capacity.
    pub(crate) fn new(
        caches: impl IntoIterator<Item = impl Into<ModelCacheConfig>>,
        capacity: usize,
    ) -> Self {
        let caches = caches.into_iter().map(Into::into).collect();
        Self { caches, capacity, exact: false, batch: 1, pass: None, generates: false }
    }

    /// Processes as many tokens as the capacity in one forward pass.
    pub(crate) fn in_one_pass(self) -> Self {
        Self { pass: Some(self.capacity), ..self }
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
                // Without generation, the chunk does not depend on the device.
                None if self.generates => {
                    usage.with_pass(GenerateOptions::prefill_chunk_for(spec, device))
                }
                None => usage,
            }
        };
        caches.into_iter().map(usage).collect()
    }
}

/// The memory available before the model was loaded, and the bytes of its weights.
#[derive(Clone, Debug)]
pub(crate) struct MemoryBudget {
    limit: MemoryLimit,
    weights: Rc<RefCell<WeightBytes>>,
}

impl MemoryBudget {
    pub(crate) fn new(limit: MemoryLimit) -> Self {
        Self { limit, weights: Rc::default() }
    }

    /// Checks that a cache fits, before it is allocated.
    pub(crate) fn check(&self, spec: &ModelSpec, usage: &Usage) -> kv_models::Result<()> {
        Planned::new(spec, &self.weights.borrow(), None).check(usage, &self.limit)
    }
}

/// Observes a load: checks the memory request and draws a progress bar.
pub(crate) struct Loading {
    request: MemoryRequest,
    budget: MemoryBudget,
    start: Instant,
    bytes: usize,
    bar: Option<ProgressBar>,
    device: Device,
    /// The cache whose kernels are compiled.
    cache: Option<KvCacheConfig>,
    ahead: Option<CompileAhead>,
}

/// A load shorter than this shows no bar.
const SHORT: Duration = Duration::from_millis(700);

impl Loading {
    pub(crate) fn new(request: MemoryRequest, budget: MemoryBudget, device: &Device) -> Self {
        let (start, device) = (Instant::now(), device.clone());
        Self { request, budget, start, bytes: 0, bar: None, device, cache: None, ahead: None }
    }
}

impl LoadObserver for Loading {
    fn begin(&mut self, planned: &Planned<'_>) -> kv_models::Result<()> {
        self.budget.weights.replace(planned.weights.clone());
        for usage in self.request.usages(planned.spec, planned.cache, &self.device) {
            planned.check(&usage, &self.budget.limit)?;
            // Kernels are compiled when only the first layer is loaded.
            self.cache.get_or_insert_with(|| usage.cache.layer(planned.spec, 0));
        }
        Ok(())
    }

    fn first_layer(&mut self, model: LanguageModel) {
        let generates = self.request.generates && !Flex::hosts(&self.device);
        let cache = self.cache.filter(|_| generates);
        self.ahead = cache.map(|cache| CompileAhead::start(model, cache, &self.device));
    }

    fn read(&mut self, bytes: usize) {
        self.bytes += bytes;
        if self.start.elapsed() > SHORT {
            let total = self.budget.weights.borrow().in_files;
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
