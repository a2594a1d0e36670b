//! A decode step allocates as often at every length.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "all pass on what the caller promises")]

mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

use burn::tensor::{Int, Tensor};
use common::{device, tiny};
use kv_models::{kv_cubecl::KvCacheConfig, load};

/// Counts what it hands out.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One thread, since how often threads meet is not up to the step.
#[test]
fn steps_allocate_as_often_at_every_length() {
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global().unwrap();
    let device = device();
    let model = load(tiny("llama-tiny"), &device).unwrap().model;
    for name in ["float", "float-f16", "k8v8", "k4v4", "k4v2", "k2v2"] {
        const PERIOD: usize = 32;
        let config: KvCacheConfig = format!("{name}-g16-r{PERIOD}").parse().unwrap();
        let mut cache = model.new_cache(config.with_capacity(512), 1, &device).unwrap();
        let mut counts = Vec::new();
        for until in [PERIOD, 160, 448] {
            while cache.len() < until {
                let chunk = 100.min(until - cache.len());
                let ids = Tensor::<2, Int>::zeros([1, chunk], &device);
                model.hidden_step(ids, &mut cache).unwrap();
            }
            // Steps that flush keys allocate more; they come once per period.
            let count: Vec<usize> = (0..2 * PERIOD)
                .map(|_| {
                    let ids = Tensor::<2, Int>::zeros([1, 1], &device);
                    let before = ALLOCATIONS.load(Ordering::Relaxed);
                    let logits = model.step(ids, &mut cache).unwrap();
                    let after = ALLOCATIONS.load(Ordering::Relaxed);
                    drop(logits);
                    after - before
                })
                .collect();
            let (least, most) = (*count.iter().min().unwrap(), *count.iter().max().unwrap());
            let flushes = count.iter().filter(|&&n| n > least).count();
            counts.push((least, most, flushes));
        }
        assert!(counts[0].2 <= 2, "{name}: {counts:?} (least, most, steps with more)");
        assert!(counts.iter().all(|count| *count == counts[0]), "{name}: {counts:?}");
    }
}
