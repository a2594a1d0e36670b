//! Perplexity of a real model with a quantized cache, streamed token by token, and in the parallel
//! form that needs no loop over tokens.
//!
//! Usage: `streaming-perplexity MODEL TEXT [TOKENS]`
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs print")]

use std::fs::File;

use anyhow::{Context, Result};
use burn_kv::cache::{Flex, KvCacheConfig, On};
use burn_kv::eval::{Mode, Plan, evaluate};

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: streaming-perplexity MODEL TEXT [TOKENS]";
    let (model, text) = (args.next().context(usage)?, args.next().context(usage)?);
    let tokens: usize = args.next().as_deref().unwrap_or("256").parse().context(usage)?;

    let device = On::<Flex>::open()?;
    let loaded = burn_kv::models::load(model, &device)?;
    let tokenizer = loaded.tokenizer?;
    let file = File::open(&text).with_context(|| format!("{text}: cannot read"))?;
    let ids = tokenizer.encode_reader(file, &text, Some(tokens))?;
    // If the model was trained on texts with a begin-of-text token, every window starts with it.
    let bos = tokenizer.leading_bos();
    let caches: Vec<KvCacheConfig> =
        ["k4v4", "k2v2-r64"].iter().map(|name| name.parse()).collect::<Result<_, _>>()?;

    println!(
        "{:<10} {:<10} {:>10} {:>10} {:>10}",
        "cache", "mode", "perplexity", "kl mean", "tokens/s"
    );
    for mode in [Mode::Streaming, Mode::Parallel] {
        let plan = Plan::new(&loaded.model, mode, &caches, ids.clone(), tokens, Some(tokens))?
            .with_bos(&loaded.model, bos)?;
        for run in evaluate(&device, &loaded.model, &plan, |_| ())? {
            println!(
                "{:<10} {:<10} {:>10.4} {:>10.6} {:>10.1}",
                run.cache,
                run.mode.to_string(),
                run.perplexity,
                run.kl_mean,
                run.tokens_per_second(),
            );
        }
    }
    Ok(())
}
