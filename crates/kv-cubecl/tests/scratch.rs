//! What the CPU backend allocates while it attends, beside inputs and outputs, does not grow with
//! the length of the context.
#![cfg(feature = "flex")]
#![allow(clippy::unwrap_used, reason = "a failing test may panic")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use burn::tensor::{Device, Distribution, Tensor};
use kv_cubecl::{
    CacheShape, Flex, FrameCache, FrameConfig, Frames, KvCache, KvCacheConfig, Target,
    streaming_attention,
};

/// The system's allocator, which also counts the bytes that are allocated, the most that ever were,
/// and how often it is called.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);
static CALLS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Relaxed);
        MOST.fetch_max(HELD.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller keeps the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the same contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Most bytes allocated at a time by `work`, beyond what was allocated before.
fn peak<T>(work: impl FnOnce() -> T) -> usize {
    let start = HELD.load(Relaxed);
    MOST.store(start, Relaxed);
    let result = work();
    drop(result);
    MOST.load(Relaxed) - start
}

/// Query heads, all of one kv head.
const HEADS: usize = 4;

fn random(device: &Device, heads: usize, tokens: usize, head_dim: usize) -> Tensor<4> {
    Tensor::random([1, heads, tokens, head_dim], Distribution::Default, device)
}

/// Peak of attending with a chunk of 64 tokens to a cache of `len` tokens.
fn chunk(device: &Device, name: &str, len: usize) -> usize {
    let config: KvCacheConfig = name.parse().unwrap();
    let shape = CacheShape::new(1, 1, 32);
    let mut cache = KvCache::new(&config.with_capacity(len + 64), shape, device).unwrap();
    cache.append(random(device, 1, len, 32), random(device, 1, len, 32)).unwrap();
    let (q, k) = (random(device, HEADS, 64, 32), random(device, 1, 64, 32));
    peak(|| cache.attend(q, k.clone(), k).unwrap().output)
}

/// Peak of `streaming_attention` of `tokens` tokens and, on an autodiff device, its gradients.
fn closed_form(device: &Device, tokens: usize) -> usize {
    let config: KvCacheConfig = "k4v16-g8-r128".parse().unwrap();
    let (q, k) = (random(device, HEADS, tokens, 4), random(device, 1, tokens, 4));
    let q = if device.is_autodiff() { q.require_grad() } else { q };
    peak(|| {
        let output = streaming_attention(q, k.clone(), k, &config).unwrap().output;
        device.is_autodiff().then(|| output.sum().backward())
    })
}

/// Peaks of a frame of 64 tokens over a full ring of `frames` frames, and how often memory is
/// allocated, for several frames one after the other.
fn frames(device: &Device, name: &str, frames: u64) -> Vec<(usize, usize)> {
    let config = FrameConfig::new(name.parse().unwrap(), 64, Frames(frames));
    let mut cache = FrameCache::new(&config, CacheShape::new(1, 1, 32), device).unwrap();
    let (q, k) = (random(device, HEADS, 64, 32), random(device, 1, 64, 32));
    for _ in 0..frames {
        cache.append(k.clone(), k.clone()).unwrap();
    }
    let steps = (0..8).map(|_| {
        let (q, k, calls) = (q.clone(), k.clone(), CALLS.load(Relaxed));
        let peak = peak(|| {
            cache.peek(q.clone(), k.clone(), k.clone()).unwrap();
            cache.update(q, k.clone(), k).unwrap().output
        });
        (peak, CALLS.load(Relaxed) - calls)
    });
    steps.collect()
}

/// The only test of this program: another one would allocate at the same time.
#[test]
fn scratch_memory_is_bounded() {
    let device = Flex::open().unwrap();
    // How much more a thread would allocate for a context longer by `more` tokens if it held all
    // scores of a block of rows: 64 tokens by the query heads, in f32.
    let scores = |more: usize| 4 * 64 * HEADS * more;
    for name in ["float", "k2v2"] {
        let [short, long] = [16_384, 65_536].map(|len| chunk(&device, name, len));
        let more = long.saturating_sub(short);
        assert!(more < scores(49_152) / 10, "chunk over {name}: {short} bytes, then {long}");
    }
    for name in ["float", "kint8vint8", "k4v4"] {
        let [short, long] = [129, 513].map(|n| frames(&device, name, n));
        // A restored window of as many more frames, keys and values in f32.
        let restored = 2 * 4 * 32 * 64 * (513 - 129);
        let more = long[0].0.saturating_sub(short[0].0);
        assert!(more < restored / 10, "frames of {name}: {} bytes, then {}", short[0].0, long[0].0);
        // Each frame is like the one before; how threads share the work differs by a few.
        let calls = || long.iter().map(|(_, calls)| *calls);
        let (least, most) = (calls().min().unwrap(), calls().max().unwrap());
        assert!(most - least < 32, "frames of {name}: {long:?}");
    }
    let [short, long] = [6_144, 12_288].map(|tokens| closed_form(&device, tokens));
    // Inputs and outputs grow as well, by 10 tensors of [HEADS, tokens, 4] and more.
    let more = long.saturating_sub(short);
    assert!(more < scores(6_144) / 2, "closed form: {short} bytes, then {long}");
    #[cfg(feature = "autodiff")]
    {
        let device = device.autodiff();
        let [short, long] = [6_144, 12_288].map(|tokens| closed_form(&device, tokens));
        let more = long.saturating_sub(short);
        assert!(more < scores(6_144), "gradients: {short} bytes, then {long}");
    }
}
