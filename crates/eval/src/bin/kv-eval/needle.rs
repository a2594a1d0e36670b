//! `kv-eval needle`: hides passages in a long text, and asks for them.

use anyhow::Result;
use kv_cli::{NamedFiles, Plain, cache_help, dispatch, exit_on_interrupt, window_bar};
use kv_cubecl::{KvCacheConfig, On, Target};
use kv_eval::{NeedlePlan, needles};
use kv_models::ModelCacheConfig;

use crate::{
    arguments::{NamedCache, TextArgs, TextIds, configs, policies},
    common::{ModelArgs, Weights, note_policies},
    json::{JsonArgs, show},
    loading::MemoryRequest,
    source::{self, Source},
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kv-eval needle --model models/austen --text models/austen/heldout.txt --cache k4v4-gflush
  kv-eval needle -m SmolLM2-135M.gguf -f novel.txt --context 2048 --chunks 8 --cache k2v2-s4")]
pub(crate) struct Args {
    #[command(flatten)]
    on: ModelArgs,
    #[command(flatten)]
    text: TextArgs,
    #[arg(long = "cache", help = cache_help("A cache beside the float one, repeatable"))]
    caches: Vec<NamedCache>,
    /// Tokens of a prompt.
    #[arg(long, default_value_t = 1024)]
    context: usize,
    /// Tokens of a needle.
    #[arg(long, default_value_t = 48)]
    needle: usize,
    /// First tokens of the needle that the prompt repeats last; the others are to be predicted.
    #[arg(long, default_value_t = 16)]
    cue: usize,
    /// Number of equal parts of the text, each with a place for a needle.
    #[arg(long, default_value_t = 16)]
    chunks: usize,
    #[command(flatten)]
    json: JsonArgs,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let files = NamedFiles::default().reads("text", &args.text.path);
    policies(files, &args.caches)
        .reads_model("model", args.on.source.given())
        .writes("json", args.json.path())
        .check()?;
    exit_on_interrupt()?;
    dispatch!(args.on.backend, Plain, run_on(args))
}

fn run_on<T: Target>(args: &Args) -> Result<()> {
    let device = On::<T>::open()?;
    let (screen, json) = args.json.open()?;
    let &Args { context, needle, cue, chunks, .. } = args;
    let plan = NeedlePlan { context, needle, cue, chunks };
    let float = ModelCacheConfig::from(KvCacheConfig::float());
    let caches: Vec<_> = [float].into_iter().chain(configs(&args.caches)).collect();
    let request = MemoryRequest::new(caches.iter().cloned(), context).in_one_pass();
    let (Source { model, tokenizer, .. }, _) =
        source::load(&args.on, Weights::Restored, request, &device)?;
    note_policies(&caches, model.spec());
    let TextIds { ids, .. } = args.text.read(&tokenizer, Some(plan.text()))?;
    let bar = window_bar();
    bar.set_length(caches.len().saturating_mul(chunks) as u64);
    let found = needles(&device, &model, &ids, &caches, plan, |_| bar.inc(1));
    bar.finish_and_clear();
    let found = found?;
    show(screen, json, &found)
}
