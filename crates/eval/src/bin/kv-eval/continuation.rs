//! `kv-eval continue`: counts the generated tokens before a cache changes the text.

use anyhow::Result;
use kv_cli::{
    MemoryRequest, ModelArgs, NamedFiles, Plain, Weights, cache_help, count_bar, dispatch,
    exit_on_interrupt,
    source::{self, Source},
};
use kv_cubecl::{On, Target};
use kv_eval::{ContinuationPlan, continuations};

use crate::{
    arguments::{NamedCache, TextArgs, policies, with_float},
    common::{note_policies, read_ids},
    json::{JsonArgs, show},
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kv-eval continue --model models/austen --text models/austen/heldout.txt --cache k4v4
  kv-eval continue -m SmolLM2-135M.gguf -f novel.txt --context 4096 --cache kvn2vvn2-s4")]
pub(crate) struct Args {
    #[command(flatten)]
    on: ModelArgs,
    #[command(flatten)]
    text: TextArgs,
    #[arg(long = "cache", required = true,
        help = cache_help("A cache to compare with float, repeatable"))]
    caches: Vec<NamedCache>,
    /// Number of prompts: passages of the text that follow each other.
    #[arg(long, default_value_t = 8)]
    prompts: usize,
    /// Tokens of a prompt.
    #[arg(long, default_value_t = 512)]
    context: usize,
    /// Tokens to generate after each prompt, past any end-of-text token.
    #[arg(long, default_value_t = 256)]
    generate: usize,
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
    let &Args { prompts, context, generate, .. } = args;
    let caches = with_float(&args.caches);
    let capacity = context.saturating_add(generate);
    let request =
        MemoryRequest { generates: true, ..MemoryRequest::new(caches.iter().cloned(), capacity) };
    let (Source { model, tokenizer, .. }, _) =
        source::load(&args.on, Weights::Packed, request, &device)?;
    note_policies(&caches, model.spec());
    let bos = args.text.bos.choose(&tokenizer)?;
    let plan = ContinuationPlan { prompts, context, generate, bos };
    let (ids, _) = read_ids(&args.text.path, &tokenizer, Some(plan.text()))?;
    let bar = count_bar();
    bar.set_length(caches.len().saturating_mul(prompts) as u64);
    let found = continuations(&device, &model, &ids, &caches, plan, || bar.inc(1));
    bar.finish_and_clear();
    show(screen, json, &found?)
}
