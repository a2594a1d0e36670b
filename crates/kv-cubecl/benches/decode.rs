//! Decode attention by context length: `cargo bench -p kv-cubecl --features flex --bench decode`.
//!
//! Each row is the median of one step (append one token, attend) and the rate at which it reads the
//! cache, beside the float cache measured in the same run.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs print")]
#![allow(missing_docs, reason = "a program")]

use std::time::Instant;

use burn::tensor::{Distribution, Tensor};
use kv_cubecl::{CacheShape, KvCache, KvCacheConfig, On, Target};

const STEPS: usize = 31;

fn run<T: Target>(n_heads: usize, n_kv_heads: usize, head_dim: usize) {
    let device = match On::<T>::open() {
        Ok(device) => device,
        Err(error) => return println!("SKIPPED {}: {error}", T::NAME),
    };
    println!("{}, {n_heads} query heads on {n_kv_heads} kv heads of {head_dim}", T::NAME);
    println!(
        "{:<10} {:>8} {:>10} {:>10} {:>8} {:>8}",
        "cache", "context", "us/step", "KB read", "GB/s", "x float"
    );
    let random = |heads, tokens| {
        let shape = [1, heads, tokens, head_dim];
        Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), &*device)
    };
    let mut float_us = Vec::new();
    for name in ["float", "float-f16", "k8v8", "k4v4", "k2v2"] {
        for (i, context) in [512, 2048, 8192].into_iter().enumerate() {
            let config: KvCacheConfig = name.parse().expect("a cache name");
            let config = config.with_capacity(context + STEPS + 1);
            let shape = CacheShape { batch: 1, n_kv_heads, head_dim };
            let mut cache = KvCache::new(&config, shape, &device).expect("a cache");
            cache.append(random(n_kv_heads, context), random(n_kv_heads, context)).expect("room");
            let mut us: Vec<f64> = (0..STEPS)
                .map(|_| {
                    let (q, k, v) =
                        (random(n_heads, 1), random(n_kv_heads, 1), random(n_kv_heads, 1));
                    device.sync().expect("the device answers");
                    let start = Instant::now();
                    let output = cache.attend(q, k, v).expect("room");
                    output.into_data();
                    start.elapsed().as_secs_f64() * 1e6
                })
                .collect();
            us.sort_by(f64::total_cmp);
            let us = us[STEPS / 2];
            if name == "float" {
                float_us.push(us);
            }
            let bytes = cache.layout().bytes_read(context) as f64;
            println!(
                "{name:<10} {context:>8} {us:>10.1} {:>10.0} {:>8.2} {:>8.2}",
                bytes / 1e3,
                bytes / us / 1e3,
                us / float_us[i],
            );
        }
    }
}

fn main() {
    #[cfg(feature = "flex")]
    run::<kv_cubecl::Flex>(9, 3, 64);
    #[cfg(feature = "wgpu")]
    if std::env::args().any(|arg| arg == "wgpu") {
        run::<kv_cubecl::Wgpu>(9, 3, 64);
    }
    #[cfg(feature = "cuda")]
    run::<kv_cubecl::Cuda>(32, 8, 128);
}
