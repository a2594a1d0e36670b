//! Loads models after checking that they fit into memory, and shows the progress.

use std::{
    cell::{Cell, RefCell},
    cmp::Reverse,
    rc::Rc,
    time::{Duration, Instant},
};

use burn::tensor::Device;
use indicatif::ProgressBar;
use kv_cubecl::{Flex, KvCacheConfig, Target};
use kv_models::{
    CompileAhead, DeviceUse, GenerateOptions, LanguageModel, LoadObserver, MemoryLimit,
    ModelCacheConfig, ModelSpec, Planned, Usage, WeightBytes, decimal_size,
};

use crate::load_bar;

/// The memory that a command needs besides weights: its caches and its forward passes.
#[derive(Clone, Debug)]
pub struct MemoryRequest {
    /// The caches. Empty means the cache that the model's files name, or else float.
    pub caches: Vec<ModelCacheConfig>,
    /// The caches that a benchmark holds at once, with their sequences. Empty if only one of
    /// `caches` is held at a time.
    pub held: Vec<(ModelCacheConfig, usize)>,
    /// One of the held caches is copied at a time.
    pub copies: bool,
    /// Capacity of each cache in tokens, clamped to the model's positions unless `exact`.
    pub capacity: usize,
    /// Refuse a capacity beyond the model's positions instead of clamping it.
    pub exact: bool,
    /// Number of sequences.
    pub batch: usize,
    /// Tokens processed in one forward pass; `None` for one chunk of prefill.
    pub pass: Option<usize>,
    /// Rows of logits besides the last of each sequence, counted in the plan of a device's memory.
    pub logits: usize,
    /// Compile the kernels of the first cache's layers during the load, to generate text with it.
    pub generates: bool,
}

impl MemoryRequest {
    /// Requests `caches` of one sequence with this capacity.
    pub fn new(
        caches: impl IntoIterator<Item = impl Into<ModelCacheConfig>>,
        capacity: usize,
    ) -> Self {
        let caches = caches.into_iter().map(Into::into).collect();
        Self {
            caches,
            held: vec![],
            copies: false,
            capacity,
            exact: false,
            batch: 1,
            pass: None,
            logits: 0,
            generates: false,
        }
    }

    /// Processes as many tokens as the capacity in one forward pass.
    pub fn in_one_pass(self) -> Self {
        Self { pass: Some(self.capacity), ..self }
    }

    /// Returns the bytes that weights, activations and caches take together.
    fn total(&self, planned: &Planned<'_>, usages: &[Usage]) -> kv_models::Result<u64> {
        let needed = usages.iter().map(|usage| planned.footprint(usage));
        let mut needed = needed.collect::<kv_models::Result<Vec<_>>>()?;
        needed.sort_by_key(|needed| Reverse(needed.total()));
        let held = self.held.iter().map(|(cache, batch)| {
            let cache = cache.clone().with_capacity(usages[0].cache.capacity);
            Ok(planned.cache_bytes(&Usage::new(cache).with_batch(*batch))?.total())
        });
        let mut held = held.collect::<kv_models::Result<Vec<_>>>()?;
        if held.is_empty() {
            held.push(needed[0].cache);
        } else if self.copies {
            held.extend(held.iter().copied().max());
        }
        let logits = size_of::<f32>() * self.logits * planned.spec.vocab_size;
        let rest = needed[0].weights + needed[0].activations + logits;
        Ok((rest + held.iter().sum::<usize>()) as u64)
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
        let capacity = self.capacity.min(spec.max_positions);
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

/// The memory available before the model was loaded, the bytes of its weights, and the memory that
/// is planned and used. Clones share it.
#[derive(Clone, Debug)]
pub struct MemoryBudget {
    limit: MemoryLimit,
    weights: Rc<RefCell<WeightBytes>>,
    used: Rc<Cell<Used>>,
}

/// Bytes on the device.
#[derive(Clone, Copy, Debug, Default)]
struct Used {
    /// The plan made before the model is loaded.
    at_load: u64,
    /// The largest plan for a cache after that; 0 without one.
    later: u64,
    peak: u64,
}

impl MemoryBudget {
    /// Creates a budget with nothing planned yet.
    pub fn new(limit: MemoryLimit) -> Self {
        Self { limit, weights: Rc::default(), used: Rc::default() }
    }

    /// Returns the bytes that the plan of the load leaves, as far as they are known.
    pub fn left(&self) -> Option<u64> {
        self.limit.total.map(|total| total.saturating_sub(self.used.get().at_load))
    }

    /// Adds the plan of another model's load, which used the [rest](Self::rest).
    pub(crate) fn add(&self, other: &Self) {
        let more = other.used.get().at_load;
        self.change(|used| used.at_load += more);
    }

    /// Returns the budget of another model beside this one.
    #[must_use]
    pub fn rest(&self) -> Self {
        let mut limit = self.limit.clone();
        limit.total = self.left();
        limit.source = format!("the rest of {}", limit.source);
        Self::new(limit)
    }

    /// Checks that a cache fits, before it is allocated.
    ///
    /// # Errors
    /// Fails for a cache that does not fit; the error names both sizes and a remedy.
    pub fn check(&self, spec: &ModelSpec, usage: &Usage) -> kv_models::Result<()> {
        let weights = self.weights.borrow();
        let planned = Planned::new(spec, &weights, None);
        planned.check(usage, &self.limit)?;
        let later = planned.footprint(usage)?.total() as u64;
        self.change(|used| used.later = used.later.max(later));
        Ok(())
    }

    /// Reads the memory that the device's allocator has reserved, at the end of a phase. The CPU
    /// has no such allocator.
    pub fn see(&self, device: &Device) {
        if let Some(now) = DeviceUse::now(device) {
            self.change(|used| used.peak = used.peak.max(now.peak_bytes));
        }
    }

    /// Returns the device's memory until now; `None` on the CPU.
    pub fn device_use(&self, device: &Device) -> Option<DeviceUse> {
        self.see(device);
        let Used { at_load, later, peak } = self.used.get();
        let planned_bytes = Some(if later > 0 { later } else { at_load });
        (peak > 0).then_some(DeviceUse { peak_bytes: peak, planned_bytes })
    }

    fn change(&self, f: impl FnOnce(&mut Used)) {
        let mut used = self.used.get();
        f(&mut used);
        self.used.set(used);
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
    /// The caches of the layers, for which kernels are compiled.
    caches: Vec<KvCacheConfig>,
    ahead: Option<CompileAhead>,
    loaded: bool,
}

/// A load shorter than this shows no bar.
const SHORT: Duration = Duration::from_millis(700);

impl Loading {
    pub(crate) fn new(request: MemoryRequest, budget: MemoryBudget, device: &Device) -> Self {
        let (start, device) = (Instant::now(), device.clone());
        Self {
            request,
            budget,
            start,
            bytes: 0,
            bar: None,
            device,
            caches: vec![],
            ahead: None,
            loaded: false,
        }
    }
}

impl LoadObserver for Loading {
    fn begin(&mut self, planned: &Planned<'_>) -> kv_models::Result<()> {
        self.budget.weights.replace(planned.weights.clone());
        let (capacity, most) = (self.request.capacity, planned.spec.max_positions);
        if self.request.exact && capacity > most {
            let rule = format!("must be at most {most}, the positions that the model has");
            return Err(kv_models::Error::argument("capacity", capacity, rule));
        }
        let usages = self.request.usages(planned.spec, planned.cache, &self.device);
        for usage in &usages {
            planned.check(usage, &self.budget.limit)?;
        }
        let at_load = self.request.total(planned, &usages)?;
        // The logits of an evaluation are not a reason to refuse it, because they are estimated.
        let several = !self.request.held.is_empty();
        if let Some(total) = self.budget.limit.total.filter(|&total| several && at_load > total) {
            let [needed, total] = [at_load, total].map(decimal_size);
            let rule = format!(
                "need {needed} at once, but {} is {total}; compare fewer caches",
                self.budget.limit.source
            );
            let held = format!("{} caches", self.request.held.len());
            return Err(kv_models::Error::argument("cache", held, rule));
        }
        self.budget.change(|used| used.at_load = at_load);
        if self.request.generates && !Flex::hosts(&self.device) {
            self.caches = usages[0].cache.layers(planned.spec).collect();
            self.ahead = Some(CompileAhead::new(&self.device, usages[0].pass));
        }
        Ok(())
    }

    fn layer(&mut self, index: usize, model: &dyn Fn() -> LanguageModel) {
        if let Some(ahead) = &mut self.ahead {
            ahead.layer(model(), self.caches[index]);
        }
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

    fn end(&mut self) {
        self.loaded = true;
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        // Only now, because the tokenizer was read in the meantime.
        let ahead = self.ahead.take().filter(|_| self.loaded);
        if let Some(reserved) = ahead.and_then(CompileAhead::finish) {
            self.budget.change(|used| used.peak = used.peak.max(reserved));
        }
    }
}
