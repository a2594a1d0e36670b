//! What the CPU backend allocates while it attends, beside inputs, outputs and an indexer's scores,
//! does not grow with the length of the context.
#![cfg(feature = "flex")]
#![allow(clippy::unwrap_used, reason = "a failing test may panic")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use burn::tensor::{Device, Distribution, Tensor};
use kv_cubecl::{
    CacheFloat, CacheShape, Error, Flex, FrameCache, FrameConfig, Frames, KvCache, KvCacheConfig,
    KvFormat, On, RopeTable, Target,
    sparse::{
        Compression, EntryCompressor, Gated, IndexConfig, IndexQuery, KeyCompressor, RowFormat,
        SparseCache, SparseConfig, SparseMemory, Visible,
    },
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

/// Counts the allocations of a step of a sparse layer after `context` tokens, by its place in a
/// window of 4 tokens: the fewest of several steps, because a thread that takes work from another
/// one may allocate once more.
fn sparse_steps(device: &On<Flex>, keys: RowFormat, context: usize) -> [usize; 4] {
    /// Channels of an entry and of a key.
    const WIDTH: usize = 32;
    const STEPS: usize = 32;
    let compression = Compression::overlapping(4);
    let channels = compression.lanes() * WIDTH;
    let config = SparseConfig::new(WIDTH, 8)
        .with_capacity(context + STEPS)
        .with_compression(compression)
        .with_index(IndexConfig { head_dim: WIDTH, top_k: 64, keys });
    let parts = SparseCache::new(&config, 1, device).unwrap().parts();
    let part = |name: &str, _: bool| {
        let part = parts.iter().find(|part| part.name == name).unwrap();
        Ok::<_, Error>(part.tensor.clone())
    };
    let mut cache = SparseCache::from_parts(&config, vec![context], device, part).unwrap();
    drop(parts);
    let rope = || RopeTable::new(Tensor::zeros([context + STEPS, 2], &**device)).unwrap();
    let (bias, gain) = (Tensor::zeros([4, channels], &**device), Tensor::ones([WIDTH], &**device));
    let entry = EntryCompressor::new(compression, bias.clone(), gain.clone(), 1e-6, rope());
    let key = KeyCompressor::new(compression, bias, gain, 1e-6, rope(), false);
    let (entry, key) = (entry.unwrap(), key.unwrap());
    let normal = |shape| Tensor::<3>::random(shape, Distribution::Default, &**device);
    let gated = || Gated { content: normal([1, 1, channels]), gate: normal([1, 1, channels]) };
    let (query, rows) = (random(device, HEADS, 1, WIDTH), random(device, 1, 1, WIDTH));
    let index = IndexQuery { query: query.clone(), weights: normal([1, 1, HEADS]) };
    let mut fewest = [usize::MAX; 4];
    for step in 0..STEPS {
        let (first, second, calls) = (gated(), gated(), CALLS.load(Relaxed));
        let mut memory = SparseMemory::cached(&mut cache, &[1]).unwrap();
        let entries = memory.compress(&entry, first).unwrap();
        let selection = memory.select(&key, second, &index).unwrap();
        let seen = Visible::Selected(&entries, &selection);
        memory.attend(query.clone(), rows.clone(), seen, None).unwrap();
        fewest[step % 4] = fewest[step % 4].min(CALLS.load(Relaxed) - calls);
    }
    fewest
}

/// Checks that steps after 16k, 128k and a million tokens allocate memory equally often.
///
/// Steps run on a thread of the pool: a call from another thread enters a queue, which allocates
/// once in every 63 calls.
fn sparse_steps_allocate_equally_often() {
    let device = On::<Flex>::open().unwrap();
    let float = CacheFloat::ALL.iter().map(|&float| RowFormat::float(float));
    let codes = [KvFormat::Affine4, KvFormat::E4m3Blocks, KvFormat::E2m1Blocks];
    let formats: Vec<_> = float.chain(codes.map(RowFormat::codes)).collect();
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        for &keys in &formats {
            let contexts = [1 << 14, 1 << 17, 1 << 20];
            let steps = |context| pool.install(|| sparse_steps(&device, keys, context));
            let [short, longer, longest] = contexts.map(steps);
            assert!(short.iter().all(|&calls| calls > 0), "{short:?}");
            let what = format!("{keys:?}, {threads} threads");
            assert_eq!([longer, longest], [short; 2], "{what}");
        }
    }
}

/// The only test of this program: another one would allocate at the same time.
#[test]
fn scratch_memory_is_bounded() {
    sparse_steps_allocate_equally_often();
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
