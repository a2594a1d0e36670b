//! Allocations of caches: a step makes the same number of allocations at every length, a prompt
//! never needs more memory than with a float cache, and memory with a recurrent state, latent rows,
//! shared caches or experts is as planned.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    alloc::System,
    path::{Path, PathBuf},
};

use burn::tensor::{Int, Tensor};
use kv_cubecl::{Flex, KvCacheConfig, On};
use kv_eval::memory::Tracking;
use kv_models::{LanguageModel, LoadOptions, ModelCache, ModelCacheConfig, Usage, load, outline};

#[global_allocator]
static ALLOCATOR: Tracking<System> = Tracking::new(System);

/// The residual length.
const PERIOD: usize = 32;

/// A tiny model of two layers with 512 positions.
struct Caches {
    device: On<Flex>,
    model: LanguageModel,
}

fn tiny(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/models");
    folder.join(name)
}

impl Caches {
    fn load() -> Self {
        let device = On::<Flex>::open().unwrap();
        let model = load(tiny("llama-tiny"), &device).unwrap().model;
        Self { device, model }
    }

    fn empty(&self, name: &str, capacity: usize) -> ModelCache {
        let config: KvCacheConfig = format!("{name}-g16-r{PERIOD}").parse().unwrap();
        self.model.new_cache(config.with_capacity(capacity), 1, &self.device).unwrap()
    }

    /// Appends tokens until the cache holds `len`.
    fn fill(&self, cache: &mut ModelCache, len: usize) {
        while cache.len() < len {
            let chunk = 100.min(len - cache.len());
            let ids = Tensor::<2, Int>::zeros([1, chunk], &*self.device);
            self.model.hidden_step(ids, cache).unwrap();
        }
    }
}

/// Runs on one thread, because with several the number of allocations also depends on scheduling.
#[test]
fn memory_of_steps_and_prompts() {
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global().unwrap();
    let caches = Caches::load();
    for name in ["float", "float-f16", "k8v8", "k4v4", "k4v2", "k2v2"] {
        let mut cache = caches.empty(name, 512);
        let mut counts = Vec::new();
        for len in [PERIOD, 160, 448] {
            caches.fill(&mut cache, len);
            let count: Vec<usize> = (0..2 * PERIOD)
                .map(|_| {
                    let ids = Tensor::<2, Int>::zeros([1, 1], &*caches.device);
                    let before = ALLOCATOR.allocations();
                    let logits = caches.model.step(ids, &mut cache).unwrap();
                    let count = ALLOCATOR.allocations() - before;
                    drop(logits);
                    count
                })
                .collect();
            let (least, most) = (*count.iter().min().unwrap(), *count.iter().max().unwrap());
            counts.push((least, most, count.iter().filter(|&&n| n > least).count()));
        }
        // Steps that flush keys allocate more; one in `PERIOD` does.
        assert!(counts[0].2 <= 2, "{name}: {counts:?} (least, most, steps above the least)");
        assert!(counts.iter().all(|count| *count == counts[0]), "{name}: {counts:?}");
    }

    // Within the residual, both caches hold all tokens in float.
    for len in [2 * PERIOD, 100, 200, 300, 512] {
        let peak = |name: &str| {
            let (cache, peak) = ALLOCATOR.peak_of(|| {
                let mut cache = caches.empty(name, len);
                caches.fill(&mut cache, len);
                cache
            });
            drop(cache);
            peak
        };
        let float = peak("float");
        for name in ["k8v8", "k4v4", "k4v2", "k2v2"] {
            let quantized = peak(name);
            assert!(quantized < float, "{name} of {len} tokens: {quantized} bytes, float {float}");
        }
    }
    let others = ["qwen3_5-tiny", "deepseek_v3-tiny", "gemma4-tiny", "qwen3_moe-tiny"];
    for name in others.into_iter().chain(["mixtral-tiny"]) {
        for cache in ["float", "k4v4-g16-r16"] {
            memory_is_as_planned(&caches.device, name, cache);
        }
    }
}

/// Creates caches of 500 tokens for four sequences, fills them in chunks and by steps, and compares
/// the peaks with the plan.
#[track_caller]
fn memory_is_as_planned(device: &On<Flex>, name: &str, cache: &str) {
    const CAPACITY: usize = 500;
    const BATCH: usize = 4;
    const CHUNK: usize = 50;
    let outline = outline(tiny(name), device, LoadOptions::default()).unwrap();
    let model = load(tiny(name), device).unwrap().model;
    let config = cache.parse::<ModelCacheConfig>().unwrap().with_capacity(CAPACITY);
    let new_cache = || model.new_cache(config.clone(), BATCH, device).unwrap();
    let pass = |cache: &mut ModelCache, n: usize| {
        let ids = Tensor::<2, Int>::ones([BATCH, n], &**device);
        drop(model.step(ids, cache).unwrap());
    };
    // Matrix products keep the memory that the first of them allocates.
    pass(&mut new_cache(), CHUNK);
    let planned = |tokens: usize| {
        let usage = Usage::new(config.clone()).with_batch(BATCH).with_pass(BATCH * tokens);
        let planned = outline.planned();
        let activations = planned.footprint(&usage).unwrap().activations;
        (planned.cache_bytes(&usage).unwrap(), activations)
    };
    let (bytes, of_chunk) = planned(CHUNK);
    let (_, of_step) = planned(1);

    let (mut filled, created) = ALLOCATOR.peak_of(new_cache);
    let ((), chunks) = ALLOCATOR.peak_of(|| {
        (0..CAPACITY / CHUNK - 1).for_each(|_| pass(&mut filled, CHUNK));
    });
    let ((), steps) = ALLOCATOR.peak_of(|| (0..CHUNK).for_each(|_| pass(&mut filled, 1)));
    let total = bytes.total();
    let limits = [
        (created, total..total + (64 << 10)),
        // The plan's activations are an estimate without the scores of a block of tokens.
        (chunks, 0..of_chunk * 6 / 5),
        (steps, 0..of_step * 2),
    ];
    for (what, (peak, limit)) in ["created", "chunks", "steps"].into_iter().zip(limits) {
        assert!(limit.contains(&peak), "{name} {cache}, {what}: {peak} is not in {limit:?}");
    }
}
