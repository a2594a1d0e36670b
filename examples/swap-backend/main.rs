//! One generic function on two targets: the backend is a type parameter.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs print")]

use anyhow::Result;
use burn::tensor::{Tensor, TensorData};
use burn_kv::cache::{CacheShape, KvCache, KvCacheConfig, On, Target};

/// Streams 300 tokens through a quantized cache on target `T` and returns the last output.
fn last_output<T: Target>(config: &KvCacheConfig) -> Result<Vec<f32>> {
    let device = On::<T>::open()?;
    let shape = CacheShape::new(1, 2, 64);
    let mut cache = KvCache::new(&config.with_capacity(512), shape, &device)?;

    // [batch, heads, tokens, head_dim]: four query heads share two kv heads.
    let wave = |heads: usize, phase: f32| {
        let n = heads * 300 * 64;
        let data: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37 + phase).sin()).collect();
        Tensor::<4>::from_data(TensorData::new(data, [1, heads, 300, 64]), &*device)
    };
    let (q, k, v) = (wave(4, 0.0), wave(2, 1.0), wave(2, 2.0));

    let mut output = None;
    for t in 0..300 {
        let at = |x: &Tensor<4>| x.clone().narrow(2, t, 1);
        output = Some(cache.attend(at(&q), at(&k), at(&v))?.output);
    }
    let output: Vec<f32> = output.map_or(vec![], |x| x.into_data().iter::<f32>().collect());
    let counts = cache.quantized_counts();
    println!(
        "{:<5} {} tokens: {} keys and {} values quantized, {} bytes, first output {:.5}",
        T::NAME,
        cache.len(),
        counts.keys,
        counts.values,
        cache.memory_bytes().total(),
        output[0],
    );
    Ok(output)
}

fn main() -> Result<()> {
    let config: KvCacheConfig = "k4v2-r64".parse()?;
    let cpu = last_output::<burn_kv::cache::Flex>(&config)?;

    #[cfg(feature = "wgpu")]
    {
        let gpu = last_output::<burn_kv::cache::Wgpu>(&config)?;
        let worst = cpu.iter().zip(&gpu).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("largest difference {worst:.1e}");
        anyhow::ensure!(worst < 1e-4, "the two targets disagree");
    }
    #[cfg(not(feature = "wgpu"))]
    println!("build with --features wgpu to run the same function there ({} numbers)", cpu.len());
    Ok(())
}
