//! Benchmarks of single operations, for development: `cargo bench -p kv-cubecl --features flex`.
//!
//! Published numbers come from `kv-eval bench`, which takes turns between the things it compares.
#![allow(missing_docs, reason = "a program")]

use std::cell::RefCell;

use burn::tensor::{Distribution, Tensor};
use divan::{Bencher, counter::BytesCount};
use kv_cubecl::{
    CacheShape, Granularity, KvCache, KvCacheConfig, KvFormat, On, Target, quantize,
    streaming_attention,
};

#[cfg(feature = "cuda")]
use kv_cubecl::Cuda;
#[cfg(feature = "flex")]
use kv_cubecl::Flex;
#[cfg(feature = "wgpu")]
use kv_cubecl::Wgpu;

/// SmolLM2-135M: query heads, kv heads, channels.
const SHAPE: (usize, usize, usize) = (9, 3, 64);

const CACHES: [&str; 5] = ["float", "float-f16", "k8v8", "k4v4", "k2v2"];

fn main() {
    divan::main();
}

fn open<T: Target>() -> On<T> {
    On::open().unwrap_or_else(|error| panic!("{error}"))
}

fn random<T: Target>(on: &On<T>, heads: usize, tokens: usize) -> Tensor<4> {
    Tensor::random([1, heads, tokens, SHAPE.2], Distribution::Normal(0.0, 1.0), &**on)
}

macro_rules! benches {
    ($($feature:literal: $target:ident, $module:ident;)*) => {$(
        #[cfg(feature = $feature)]
        mod $module {
            use super::*;

            #[divan::bench(args = CACHES, consts = [1024, 8192])]
            fn append_and_attend<const N: usize>(bencher: Bencher<'_, '_>, cache: &str) {
                super::append_and_attend::<$target>(bencher, cache, N);
            }

            #[divan::bench(args = CACHES, consts = [512, 2048])]
            fn streaming<const N: usize>(bencher: Bencher<'_, '_>, cache: &str) {
                super::streaming::<$target>(bencher, cache, N);
            }

            #[divan::bench(args = [KvFormat::Affine2, KvFormat::Affine4, KvFormat::Affine8])]
            fn quantize_keys(bencher: Bencher<'_, '_>, bits: KvFormat) {
                super::quantize_side::<$target>(bencher, Granularity::PerChannel, bits);
            }

            #[divan::bench(args = [KvFormat::Affine2, KvFormat::Affine4, KvFormat::Affine8])]
            fn quantize_values(bencher: Bencher<'_, '_>, bits: KvFormat) {
                super::quantize_side::<$target>(bencher, Granularity::PerToken, bits);
            }
        }
    )*};
}

benches! {
    "flex": Flex, flex;
    "wgpu": Wgpu, wgpu;
    "cuda": Cuda, cuda;
}

fn append_and_attend<T: Target>(bencher: Bencher<'_, '_>, cache: &str, context: usize) {
    /// Steps timed before the cache is emptied and refilled; refilling is not timed.
    const STEPS: usize = 64;
    let on = open::<T>();
    let (n_heads, n_kv_heads, head_dim) = SHAPE;
    let config: KvCacheConfig = cache.parse().expect("a cache name");
    let shape = CacheShape::new(1, n_kv_heads, head_dim);
    let side = random(&on, n_kv_heads, context);
    let config = config.with_capacity(context + STEPS);
    let cache = RefCell::new(KvCache::new(&config, shape, &on).expect("a cache"));
    let [q, k, v] = [n_heads, n_kv_heads, n_kv_heads].map(|heads| random(&on, heads, 1));
    bencher
        .counter(BytesCount::new(cache.borrow().layout().bytes_read(context)))
        .with_inputs(|| {
            let mut cache = cache.borrow_mut();
            if cache.len() == cache.capacity() || cache.is_empty() {
                cache.reset();
                cache.append(side.clone(), side.clone()).expect("room");
            }
            [q.clone(), k.clone(), v.clone()]
        })
        .bench_local_values(|[q, k, v]| {
            let output = cache.borrow_mut().attend(q, k, v).expect("room").output;
            on.sync().expect("the device answers");
            output
        });
}

fn streaming<T: Target>(bencher: Bencher<'_, '_>, cache: &str, tokens: usize) {
    let on = open::<T>();
    let config: KvCacheConfig = cache.parse().expect("a cache name");
    let [q, k, v] = [SHAPE.0, SHAPE.1, SHAPE.1].map(|heads| random(&on, heads, tokens));
    bencher.bench_local(|| {
        let output =
            streaming_attention(q.clone(), k.clone(), v.clone(), &config).expect("it fits").output;
        on.sync().expect("the device answers");
        output
    });
}

fn quantize_side<T: Target>(bencher: Bencher<'_, '_>, granularity: Granularity, bits: KvFormat) {
    let on = open::<T>();
    let input = random(&on, SHAPE.1, 8192);
    let bytes = size_of::<f32>() * input.shape().num_elements();
    bencher.counter(BytesCount::new(bytes)).bench_local(|| {
        let packed = quantize(input.clone(), granularity, bits, 32).expect("whole groups");
        on.sync().expect("the device answers");
        packed
    });
}
