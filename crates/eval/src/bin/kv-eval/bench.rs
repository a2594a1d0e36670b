use std::{hint::black_box, path::PathBuf, time::Instant};

use anyhow::Result;
use indicatif::ProgressBar;
use kv_cubecl::{KvCacheConfig, On, Target};
use kv_eval::{
    bench::{DecodePoint, decode, median},
    dispatch,
    program::Plain,
};

use crate::{
    common::{ModelArgs, write_json},
    source::{self, Source},
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    on: ModelArgs,
    /// A cache to time; repeatable.
    #[arg(long = "cache", default_values_t = [KvCacheConfig::float()])]
    caches: Vec<KvCacheConfig>,
    /// Context lengths to time at, ascending.
    #[arg(long, value_delimiter = ',', default_value = "512,2048,8000")]
    contexts: Vec<usize>,
    /// Decode steps per context length; the median counts.
    #[arg(long, default_value_t = 15)]
    steps: usize,
    /// Write the points here as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    dispatch!(args.on.backend, Plain, run_on(args))
}

fn run_on<T: Target>(args: &Args) -> Result<()> {
    let device = On::<T>::open()?;
    let Source { model, name, .. } = source::load(&args.on.model, &device)?;
    println!("{name} on {}, median of {} decode steps", T::NAME, args.steps);
    println!("one thread copies host memory at {:.1} GB/s", copy_bandwidth() / 1e9);
    println!(
        "{:<20} {:>8} {:>10} {:>10} {:>12} {:>12} {:>8}",
        "cache", "context", "ms/step", "tokens/s", "cache MB", "ms over 1st", "GB/s"
    );
    let mut points: Vec<DecodePoint> = Vec::new();
    for config in &args.caches {
        let bar = ProgressBar::new(args.contexts.last().copied().unwrap_or(0) as u64);
        let set = |len| bar.set_position(len as u64);
        let of_cache = decode(&device, &model, config, &args.contexts, args.steps, set)?;
        bar.finish_and_clear();
        for point in &of_cache {
            let first = &of_cache[0];
            let seconds = point.step_seconds - first.step_seconds;
            let bytes = (point.bytes_read - first.bytes_read) as f64;
            let rate = if seconds > 0.0 { bytes / seconds / 1e9 } else { 0.0 };
            println!(
                "{:<20} {:>8} {:>10.2} {:>10.1} {:>12.2} {:>12.2} {:>8.2}",
                point.cache,
                point.context,
                point.step_seconds * 1e3,
                1.0 / point.step_seconds,
                point.bytes_read as f64 / 1e6,
                seconds * 1e3,
                rate,
            );
        }
        points.extend(of_cache);
    }
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &points))
}

/// Bytes read per second by one thread copying memory far larger than the caches.
fn copy_bandwidth() -> f64 {
    let source = vec![1u8; 256 << 20];
    let mut target = vec![0u8; source.len()];
    let mut seconds: Vec<f64> = (0..5)
        .map(|_| {
            let start = Instant::now();
            target.copy_from_slice(black_box(&source));
            black_box(&target);
            start.elapsed().as_secs_f64()
        })
        .collect();
    source.len() as f64 / median(&mut seconds)
}
