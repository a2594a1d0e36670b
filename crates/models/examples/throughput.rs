//! Times a model on the CPU: a parallel pass, prefill, and decode steps at growing contexts.
//!
//! ```console
//! $ cargo run --release -p kv-models --features flex --example throughput -- MODEL [CACHE] [SEQ]
//! ```
#![allow(clippy::print_stdout, reason = "a tool for people")]

use std::time::Instant;

use burn::tensor::{Device, Int, Tensor};
use kv_models::{kv_cubecl::KvCacheConfig, load};

fn main() -> kv_models::Result<()> {
    let mut args = std::env::args().skip(1);
    let path =
        args.next().unwrap_or_else(|| "target/models/SmolLM2-135M-Instruct.Q4_1.gguf".into());
    let cache = args.next().unwrap_or_else(|| "float".into());
    let seq = args.next().and_then(|n| n.parse().ok()).unwrap_or(2048);
    let device = Device::flex();

    let start = Instant::now();
    let model = load(path, &device)?.model;
    println!("load            {:8.2} s", start.elapsed().as_secs_f64());

    let config = cache.parse::<KvCacheConfig>()?.with_capacity(seq + 64);
    let vocab = model.vocab_size() as i64;
    let ids = Tensor::<1, Int>::arange(0..seq as i64, &device).mul_scalar(7919);
    let ids = ids.remainder_scalar(vocab).reshape([1, seq]);

    let start = Instant::now();
    let hidden = model.hidden(ids.clone(), &config)?;
    hidden.device().sync().ok();
    let body = start.elapsed().as_secs_f64();
    let start = Instant::now();
    for at in (0..seq).step_by(256) {
        let part = hidden.clone().narrow(1, at, 256.min(seq - at));
        model.head(part).device().sync().ok();
    }
    let head = start.elapsed().as_secs_f64();
    let speed = seq as f64 / (body + head);
    println!("parallel {seq:6} {body:8.2} s layers + {head:.2} s head = {speed:.0} tokens/s");

    let mut cache = model.new_cache(&config, 1, &device)?;
    for context in [0, 256, seq] {
        let start = Instant::now();
        let from = cache.len();
        for at in (from..context).step_by(512) {
            model.hidden_step(ids.clone().narrow(1, at, 512.min(context - at)), &mut cache)?;
        }
        let prefill = start.elapsed().as_secs_f64();
        if context > from {
            let speed = (context - from) as f64 / prefill;
            println!("prefill to {context:4} {prefill:8.2} s = {speed:.0} tokens/s");
        }
        let start = Instant::now();
        let n = 16;
        for _ in 0..n {
            model.step(ids.clone().narrow(1, 0, 1), &mut cache)?.into_data();
        }
        let each = start.elapsed().as_secs_f64() / f64::from(n);
        println!("decode at {context:5} {:8.2} ms = {:.1} tokens/s", each * 1e3, 1.0 / each);
    }
    Ok(())
}
