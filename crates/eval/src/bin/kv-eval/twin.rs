//! `kv-eval twin`: compares a quantized cache with a float cache.

use anyhow::Result;
use kv_cli::{
    MemoryRequest, ModelArgs, NamedFiles, Plain, Weights, cache_help, dispatch, exit_on_interrupt,
    note,
    source::{self, Source},
    token_bar,
};
use kv_cubecl::{KvCacheConfig, On, Target};
use kv_eval::twin;

use crate::{
    arguments::{NamedCache, TextArgs, TextIds, at_least},
    common::note_policies,
    json::{JsonArgs, show},
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kv-eval twin --model models/austen --text models/austen/heldout.txt --cache k2v2-gflush
  kv-eval twin -m SmolLM2-135M.gguf -f novel.txt --cache kint8vint8 --tokens 1000 --stop 0.5")]
pub(crate) struct Args {
    #[command(flatten)]
    on: ModelArgs,
    #[command(flatten)]
    text: TextArgs,
    #[arg(long, help = cache_help("Cache to put beside the float one"))]
    cache: NamedCache,
    /// Number of tokens, clamped to the model's limit.
    #[arg(long, default_value_t = 256, value_parser = at_least::<1>)]
    tokens: usize,
    /// Stop after the first token whose divergence from the float cache exceeds this, in nats.
    #[arg(long, allow_negative_numbers = true)]
    stop: Option<f64>,
    #[command(flatten)]
    json: JsonArgs,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    NamedFiles::default()
        .reads("text", &args.text.path)
        .reads("cache", &args.cache.name)
        .reads_model("model", args.on.source.given())
        .writes("json", args.json.path())
        .check()?;
    exit_on_interrupt()?;
    dispatch!(args.on.backend, Plain, run_on(args))
}

fn run_on<T: Target>(args: &Args) -> Result<()> {
    let device = On::<T>::open()?;
    let (screen, json) = args.json.open()?;
    let cache = &args.cache.value;
    let request = MemoryRequest::new([KvCacheConfig::float().into(), cache.clone()], args.tokens);
    let (Source { model, tokenizer, .. }, _) =
        source::load(&args.on, Weights::Packed, request, &device)?;
    note_policies([cache], model.spec());
    let (asked, most) = (args.tokens, model.max_positions());
    if asked > most {
        note(format_args!("the model has {most} positions, fewer than --tokens {asked}"));
    }
    let tokens = asked.min(most);
    let TextIds { ids, bos, .. } = args.text.read(&tokenizer, Some(tokens))?;
    let mut ids: Vec<u32> = bos.into_iter().chain(ids).collect();
    ids.truncate(tokens);
    let bar = token_bar(ids.len());
    let twin = twin(&device, &model, &ids, cache, args.stop, |_| bar.inc(1));
    bar.finish_and_clear();
    let twin = twin?;
    show(screen, json, &twin)
}
