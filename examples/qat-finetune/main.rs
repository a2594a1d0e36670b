//! Fine-tunes a model of yours on a text of yours so that it keeps its quality with a 2-bit cache:
//! prepare, train, convert, evaluate.
//!
//! Usage: `qat-finetune MODEL TEXT OUT [CACHE] [STEPS] [LR]`
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs print")]

use std::{path::Path, sync::Arc};

use anyhow::{Context, Result};
use burn_kv::cache::{Autodiff, FakeQuantOptions, Flex, KvCacheConfig, On, SteGradient};
use burn_kv::eval::{Mode, Plan, evaluate};
use burn_kv::models::LanguageModel;
use burn_kv::train::{
    Objective, QatConfig, Run, Schedule, Texts, TrainConfig,
    data::{Source, TokenFile},
    train,
};

/// Share of the text that is kept for the evaluation.
const HELD_OUT: f64 = 0.1;
/// The most tokens of the held-out text that are evaluated.
const EVALUATED: usize = 16_384;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: qat-finetune MODEL TEXT OUT [CACHE] [STEPS] [LR]";
    let [model, text, out] = [args.next(), args.next(), args.next()].map(|arg| arg.context(usage));
    let (model, text, out) = (model?, text?, out?);
    let cache: KvCacheConfig = args.next().as_deref().unwrap_or("k2v2").parse()?;
    let steps: usize = args.next().as_deref().unwrap_or("50").parse().context(usage)?;
    // Small models take larger learning rates: 1e-3 for a million weights.
    let lr: f64 = args.next().as_deref().unwrap_or("5e-5").parse().context(usage)?;

    // The backend is one type parameter: `Autodiff<Wgpu>` trains on a graphics card.
    let device = On::<Autodiff<Flex>>::open()?;
    let loaded = burn_kv::models::load(&model, &device)?;
    let tokenizer = loaded.tokenizer?;

    // The text is tokenized once; the next run uses the same file.
    let out = Path::new(&out);
    let source = Source::new([&text]);
    let tokens = TokenFile::open(&source, &tokenizer, Path::new(&model), &out.join("tokens"))?;
    let texts = Texts { train: Arc::new(tokens), valid: None };

    // Distillation: the model as it is, with a float cache, is the teacher. A quarter of the
    // sequences are trained with a float cache, which keeps the model close to the teacher without
    // quantization.
    let fake_quant = FakeQuantOptions { gradient: SteGradient::ScaleMin, ..Default::default() };
    let config = TrainConfig {
        qat: Some(QatConfig { fake_quant, ..QatConfig::new(cache) }),
        float_share: 0.25,
        objective: Objective::Distillation,
        seq_len: loaded.model.max_positions().min(1024),
        steps,
        steps_per_epoch: steps,
        schedule: Schedule { lr, min_lr: 0.0, warmup: steps / 20 },
        holdout: HELD_OUT,
        ..TrainConfig::default()
    };
    let ids = texts.windows(&config)?.1.text(EVALUATED);
    let run = Run {
        log: Some(Box::new(|line: &str| println!("{line}"))),
        log_every: 50,
        ..Run::new(out)
    };
    let trained = train(&device, loaded.model, &texts, &config, run)?;

    // The plain model again, and its cache's configuration beside it.
    let converted = trained.model.convert();
    converted.save(out.join("model"), &tokenizer)?;

    let plain = On::<Flex>::open()?;
    let before = burn_kv::models::load(&model, &plain)?.model;
    println!("{:<8} {:<10} {:>10} {:>10}", "model", "cache", "perplexity", "kl mean");
    report(&plain, "before", &before, cache, &ids)?;
    report(&plain, "after", &converted.model, cache, &ids)?;
    println!(
        "kv-eval ppl --model {} --text TEXT evaluates it with its own cache",
        out.join("model").display()
    );
    Ok(())
}

fn report(
    device: &On<Flex>,
    name: &str,
    model: &LanguageModel,
    cache: KvCacheConfig,
    ids: &[u32],
) -> Result<()> {
    let window = model.max_positions().min(2048);
    let plan = Plan::new(model, Mode::Parallel, [cache], ids.to_vec(), window, None)?;
    for run in evaluate(device, model, &plan, |_| ())? {
        println!("{name:<8} {:<10} {:>10.3} {:>10.5}", run.cache, run.perplexity, run.kl_mean);
    }
    Ok(())
}
