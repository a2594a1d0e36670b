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
    /// Refuse a capacity beyond the model's positions instead of clamping it; the name of the
    /// argument that gives it.
    pub exact: Option<&'static str>,
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
            exact: None,
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

    /// Processes `batch` sequences at a time.
    pub fn with_batch(self, batch: usize) -> Self {
        Self { batch, ..self }
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
    others: Rc<RefCell<Vec<Other>>>,
}

/// A model that takes memory beside the one of a budget. It has caches in float.
#[derive(Clone, Debug)]
struct Other {
    spec: ModelSpec,
    weights: WeightBytes,
}

impl Other {
    /// Returns its bytes beside a model that is used like this.
    fn total(&self, usage: &Usage) -> kv_models::Result<u64> {
        let capacity = usage.cache.capacity.min(self.spec.max_positions);
        let its = Usage::new(KvCacheConfig::float().with_capacity(capacity));
        let its = its.with_batch(usage.batch).with_pass(usage.pass);
        Ok(Planned::new(&self.spec, &self.weights, None).footprint(&its)?.total() as u64)
    }
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
        Self { limit, weights: Rc::default(), used: Rc::default(), others: Rc::default() }
    }

    /// Returns the bytes that the plan of the load leaves, as far as they are known.
    pub fn left(&self) -> Option<u64> {
        self.limit.total.map(|total| total.saturating_sub(self.used.get().at_load))
    }

    /// Adds the plan of another model's load, which used the [rest](Self::rest). Later checks count
    /// its weights, and caches in float that are as long as the checked ones.
    pub(crate) fn add(&self, other: &Self, spec: &ModelSpec) {
        let more = other.used.get().at_load;
        self.change(|used| used.at_load += more);
        let weights = other.weights.borrow().clone();
        self.others.borrow_mut().push(Other { spec: spec.clone(), weights });
    }

    /// Returns the budget of another model beside this one.
    #[must_use]
    pub fn rest(&self) -> Self {
        Self::new(self.limit_after(self.used.get().at_load))
    }

    /// Returns the limit of the memory beside `taken` bytes.
    fn limit_after(&self, taken: u64) -> MemoryLimit {
        let mut limit = self.limit.clone();
        limit.total = limit.total.map(|total| total.saturating_sub(taken));
        limit.source = format!("the rest of {}", limit.source);
        limit
    }

    /// Checks that a cache fits beside the other models, before it is allocated.
    ///
    /// # Errors
    /// Fails for a cache that does not fit; the error names both sizes and a remedy.
    pub fn check(&self, spec: &ModelSpec, usage: &Usage) -> kv_models::Result<()> {
        let weights = self.weights.borrow();
        let planned = Planned::new(spec, &weights, None);
        let others = self.others.borrow();
        let taken: u64 =
            others.iter().map(|other| other.total(usage)).sum::<kv_models::Result<_>>()?;
        let limit = match others.is_empty() {
            true => self.limit.clone(),
            false => self.limit_after(taken),
        };
        planned.check(usage, &limit)?;
        let later = planned.footprint(usage)?.total() as u64 + taken;
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
        if let Some(name) = self.request.exact.filter(|_| capacity > most) {
            let rule = format!("must be at most {most}, the positions that the model has");
            return Err(kv_models::Error::argument(name, capacity, rule));
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failing test may panic")]
mod tests {
    use std::path::Path;

    use kv_cubecl::On;
    use kv_models::{LoadOptions, outline};

    use super::*;

    /// A cache that is longer than the plan of the load fits beside the weights of a draft model
    /// and its cache of the same length.
    #[test]
    fn later_caches_fit_beside_other_models() {
        let device = On::<Flex>::open().unwrap();
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/models");
        let outline = |name| outline(folder.join(name), &device, LoadOptions::default()).unwrap();
        let [target, draft] = ["llama-tiny", "qwen3-tiny"].map(outline);
        let (target, draft) = (target.planned(), draft.planned());
        let usage = |cache: &str, tokens: usize| {
            let cache = cache.parse::<KvCacheConfig>().unwrap();
            Usage::new(cache.with_capacity(tokens)).with_batch(2)
        };
        let needed = |tokens: usize| {
            let own = target.footprint(&usage("k4v4-g16-r16", tokens)).unwrap();
            let its = usage("float", tokens.min(draft.spec.max_positions));
            (own.total() + draft.footprint(&its).unwrap().total()) as u64
        };
        let check = |total: u64, tokens: usize| {
            let budget = MemoryBudget::new(MemoryLimit::new(Some(total), "--memory"));
            budget.weights.replace(target.weights.clone());
            let rest = budget.rest();
            rest.weights.replace(draft.weights.clone());
            budget.add(&rest, draft.spec);
            let checked = budget.clone().check(target.spec, &usage("k4v4-g16-r16", tokens));
            (budget.used.get().later, checked.map_err(|error| error.to_string()))
        };
        for tokens in [100, 400] {
            let all = needed(tokens);
            assert_eq!(check(all, tokens), (all, Ok(())));
            let (later, refused) = check(all - 1, tokens);
            let error = refused.unwrap_err();
            assert!(later == 0 && error.contains("the rest of --memory"), "{error}");
        }
        assert!(needed(400) > needed(100));
    }
}
