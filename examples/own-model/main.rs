//! Adds a model that `burn-kv` does not know: saves, loads and trains it for a 2-bit cache,
//! evaluates it, streams it through the cache and generates text.
//!
//! Usage: `own-model [OUT] [STEPS]`
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs print")]

mod neox;

use std::{path::Path, sync::Arc};

use anyhow::{Result, ensure};
use burn_kv::{
    eval::{Mode, Plan, evaluate},
    models::{generate, load, register, save},
    prelude::*,
    train::train,
};

const TEXT: &str = "models/austen/northanger_abbey.txt";
const HELD_OUT: &str = "models/austen/heldout.txt";

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let out = args.next().unwrap_or("target/own-model".into());
    let steps: usize = args.next().as_deref().unwrap_or("1000").parse()?;
    let (out, start) = (Path::new(&out), Path::new(&out).join("start"));
    let cache: KvCacheConfig = "k2v2-r32".parse()?;

    // From here on `load` knows models of this type. A name can be registered once.
    register(neox::NeoX::FAMILY)?;
    if let Err(error) = register(neox::NeoX::FAMILY) {
        println!("registered twice: {error}");
    }

    // The starting checkpoint has random weights and the tokenizer of the repository's model.
    let device = On::<Autodiff<Flex>>::open()?;
    device.seed(7);
    let tokenizer = Tokenizer::from_folder(Path::new("models/austen"), &[])?;
    let model = neox::NeoX::random(neox::Config::small(tokenizer.n_ids()), &device)?;
    save(&start, &model.into(), &tokenizer, SaveOptions::default())?;

    // It loads and trains like any other model.
    let tokens = TokenFile::open(&Source::new([TEXT]), &tokenizer, &start, &out.join("tokens"))?;
    let texts = Texts { train: Arc::new(tokens), valid: None };
    let config = TrainConfig {
        qat: Some(QatConfig::new(cache)),
        seq_len: 128,
        batch: 8,
        steps,
        steps_per_epoch: steps,
        schedule: Schedule { lr: 3e-3, min_lr: 3e-4, warmup: steps / 20 },
        weight_decay: 0.1,
        ..TrainConfig::default()
    };
    let random = load(&start, &device)?.model;
    let trained = train(&device, random, &texts, &config, Run::new(out.join("run")))?;
    trained.model.convert().save(out.join("model"), &tokenizer)?;

    let plain = On::<Flex>::open()?;
    let ids = tokenizer.encode(&std::fs::read_to_string(HELD_OUT)?[..40_000])?;
    println!("{:<8} {:<10} {:>10}", "model", "cache", "perplexity");
    for (name, folder) in [("random", &start), ("trained", &out.join("model"))] {
        let model = load(folder, &plain)?.model;
        let plan = Plan::new(&model, Mode::Parallel, [cache], ids.clone(), 256, Some(8192))?;
        for run in evaluate(&plain, &model, &plan, |_| ())? {
            println!("{name:<8} {:<10} {:>10.2}", run.cache, run.perplexity);
        }
    }

    let model = load(out.join("model"), &plain)?.model;
    let worst = model.streaming_difference(&ids[..200], cache, &plain)?;
    println!("token by token against parallel: largest difference of a logit {worst:.0e}");
    ensure!(worst < 1e-3, "streaming and parallel disagree");
    let options = GenerateOptions { max_tokens: 40, ..GenerateOptions::default() };
    let prompt = "She was ";
    let mut streaming = model.new_cache(cache.with_capacity(512), 1, &plain)?;
    let ids = tokenizer.encode(prompt)?;
    let generated = generate(&model, &mut streaming, &ids, &options, &plain, |_| true)?;
    println!("{prompt}{}", tokenizer.decode(&generated.ids)?);
    Ok(())
}
