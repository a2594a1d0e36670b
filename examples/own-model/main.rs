//! Adds a model that `kv-models` does not know: saves, loads and trains it for a 2-bit cache,
//! evaluates it, streams it through the cache and generates text.
//!
//! Usage: `own-model [OUT] [STEPS]`
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs print")]

mod neox;

use std::{path::Path, sync::Arc};

use anyhow::{Result, ensure};
use kv_cubecl::{Autodiff, Flex, KvCacheConfig, On};
use kv_eval::{Mode, Plan, evaluate};
use kv_models::{GenerateOptions, LanguageModel, SaveOptions, Tokenizer, generate, ids_to_tensor};
use kv_train::{
    QatConfig, Run, Schedule, Texts, TrainConfig,
    data::{Source, TokenFile},
    train,
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
    kv_models::register(&neox::Files)?;
    if let Err(error) = kv_models::register(&neox::Files) {
        println!("registered twice: {error}");
    }

    // The starting checkpoint has random weights and the tokenizer of the repository's model.
    let device = On::<Autodiff<Flex>>::open()?;
    device.seed(7);
    let tokenizer = Tokenizer::from_folder(Path::new("models/austen"), &[])?;
    let config = neox::Config {
        vocab_size: tokenizer.n_ids(),
        hidden_size: 128,
        intermediate_size: 512,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        max_position_embeddings: 512,
        rotary_pct: 0.25,
        rotary_emb_base: 10_000.0,
        layer_norm_eps: 1e-5,
        hidden_act: "gelu".into(),
        use_parallel_residual: true,
        tie_word_embeddings: false,
    };
    let model = LanguageModel::new(neox::init(config, &device)?);
    kv_models::save(&start, &model, &tokenizer, SaveOptions::default())?;

    // It loads like any other model.
    let loaded = kv_models::load(&start, &device)?;
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
    let trained = train(&device, loaded.model, &texts, &config, Run::new(out.join("run")))?;
    let converted = trained.model.convert();
    converted.save(out.join("model"), &tokenizer)?;

    let plain = On::<Flex>::open()?;
    let ids = tokenizer.encode(&std::fs::read_to_string(HELD_OUT)?[..40_000])?;
    let after = kv_models::load(out.join("model"), &plain)?.model;
    println!("{:<8} {:<10} {:>10}", "model", "cache", "perplexity");
    for (name, model) in
        [("random", kv_models::load(&start, &plain)?.model), ("trained", after.clone())]
    {
        let plan = Plan::new(&model, Mode::Parallel, [cache], ids.clone(), 256, Some(8192))?;
        for run in evaluate(&plain, &model, &plan, |_| ())? {
            println!("{name:<8} {:<10} {:>10.2}", run.cache, run.perplexity);
        }
    }

    // Compares logits token by token from a cache with logits in parallel.
    let text = &ids[..200];
    let mut streaming = after.new_cache(cache.with_capacity(512), 1, &plain)?;
    let mut worst = 0f32;
    let parallel = after.forward(ids_to_tensor(text, [1, text.len()], &plain), cache)?;
    for (i, &id) in text.iter().enumerate() {
        let logits = after.step(ids_to_tensor(&[id], [1, 1], &plain), &mut streaming)?;
        let difference = (logits - parallel.clone().narrow(1, i, 1)).abs().max();
        worst = worst.max(difference.into_scalar::<f32>());
    }
    println!("token by token against all at once: largest difference of a logit {worst:.0e}");
    ensure!(worst < 1e-3, "streaming and parallel disagree");

    streaming.reset();
    let options = GenerateOptions { max_tokens: 40, ..GenerateOptions::default() };
    let prompt = "She was ";
    let ids = tokenizer.encode(prompt)?;
    let generated = generate(&after, &mut streaming, &ids, &options, &plain, |_| true)?;
    println!("{prompt}{}", tokenizer.decode(&generated.ids)?);
    Ok(())
}
