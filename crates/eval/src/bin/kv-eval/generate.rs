use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use kv_cli::{Plain, Screen, dispatch};
use kv_cubecl::{KvCacheConfig, On, Target};
use kv_models::{GenerateOptions, ModelCacheConfig, Sampling, generate};

use crate::{
    common::ModelArgs,
    source::{self, Source},
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    on: ModelArgs,
    /// The text to continue.
    #[arg(long, required_unless_present = "prompt_file", conflicts_with = "prompt_file")]
    prompt: Option<String>,
    /// Read the text to continue from a file.
    #[arg(long)]
    prompt_file: Option<PathBuf>,
    /// Use only the first tokens of the prompt.
    #[arg(long)]
    prompt_tokens: Option<usize>,
    /// What the cache stores. By default what the model's kv_cache.json says, else float.
    #[arg(long)]
    cache: Option<KvCacheConfig>,
    /// Tokens the cache is allocated for; by default prompt and continuation.
    #[arg(long)]
    capacity: Option<usize>,
    /// Tokens to generate, at most.
    #[arg(long, default_value_t = 128)]
    max_tokens: usize,
    /// 0 picks the most likely token; higher values flatten the distribution.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Sample from the smallest set of tokens with this much probability.
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Seed of the sampling.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Record the step of one token once and replay it, on devices that can (CUDA, WGPU).
    #[arg(long)]
    recorded: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    dispatch!(args.on.backend, Plain, run_on(args))
}

fn run_on<T: Target>(args: &Args) -> Result<()> {
    let device = On::<T>::open()?;
    let prompt = match (&args.prompt, &args.prompt_file) {
        (Some(prompt), _) => prompt.clone(),
        (None, Some(path)) => std::fs::read_to_string(path)
            .with_context(|| format!("prompt-file {}: cannot read", path.display()))?,
        (None, None) => bail!("prompt: give --prompt or --prompt-file"),
    };
    let Source { model, tokenizer, cache, .. } = source::load(&args.on, &device)?;
    let mut ids = tokenizer.encode(&prompt)?;
    ids.truncate(args.prompt_tokens.unwrap_or(usize::MAX));
    let wanted =
        ids.len().saturating_add(args.max_tokens).min(model.max_positions()).max(ids.len()).max(1);
    let chosen = args.cache.map(ModelCacheConfig::from).or(cache);
    let mut config = chosen.unwrap_or_else(|| KvCacheConfig::float().into());
    config.cache.capacity = args.capacity.unwrap_or(wanted);
    let mut cache = model.new_cache(&config, 1, &device)?;
    let sampling = if args.temperature == 0.0 {
        Sampling::Greedy
    } else {
        let Args { temperature, top_p, seed, .. } = *args;
        Sampling::TopP { temperature, top_p, seed }
    };
    let eos = tokenizer.eos().clone();
    let Args { max_tokens, recorded, .. } = *args;
    let options = GenerateOptions { max_tokens, sampling, eos, recorded, ..Default::default() };

    let mut text = tokenizer.stream();
    let mut failure = None;
    // Without a reader there is no use in going on.
    let generated = generate(&model, &mut cache, &ids, &options, &device, |id| {
        let part = text.push(id).map_err(anyhow::Error::from);
        part.and_then(|part| Screen::Out.print(part)).unwrap_or_else(|error| {
            failure = Some(error);
            false
        })
    })?;
    if let Some(error) = failure {
        return Err(error);
    }
    Screen::Out.line(text.finish()?)?;
    Screen::Error.line(format_args!(
        "prefill {} tokens, {:.1} tokens/s; decode {} tokens, {:.1} tokens/s; cache {config}: {} of \
         {} tokens, {:.2} MiB",
        generated.prefill_tokens,
        generated.prefill_tokens_per_second(),
        generated.decode_tokens,
        generated.decode_tokens_per_second(),
        cache.len(),
        config.cache.capacity,
        cache.memory_bytes().total() as f64 / (1 << 20) as f64,
    ))?;
    Ok(())
}
