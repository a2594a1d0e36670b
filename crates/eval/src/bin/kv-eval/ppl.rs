use std::path::PathBuf;

use anyhow::Result;
use kv_cli::{
    DeviceArgs, MemoryRequest, ModelArgs, NamedFiles, Plain, Weights, cache_help, dispatch, note,
    source::{self, Source},
};
use kv_cubecl::{KvCacheConfig, On, Target};
use kv_eval::{HEAD_ROWS, Mode, Plan};
use kv_models::KV_CACHE_FILE;

use crate::{
    arguments::{Named, NamedCache, TextArgs, TextIds, at_least, configs, policies},
    common::{Job, Output, Text, evaluate_and_report, note_policies, text_name},
    json::JsonArgs,
    profile::ProfileArgs,
};

/// Default tokens per eval window, unless the model has fewer positions.
const WINDOW: usize = 2048;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kv-eval ppl --model models/austen --text models/austen/heldout.txt --cache k4v4 --cache k2v2
  kv-eval ppl --model SmolLM2-135M.gguf --text novel.txt --tokens 4096 --stride 512 --json out.json
  kv-eval ppl --model owner/name --text - --cache kint8vint8 --mode streaming --report my-report")]
pub(crate) struct Args {
    #[command(flatten)]
    on: ModelArgs,
    #[command(flatten)]
    devices: DeviceArgs,
    #[command(flatten)]
    text: TextArgs,
    /// streaming: token by token from an empty cache. parallel: the same numbers in closed form.
    #[arg(long, default_value = "parallel")]
    mode: Mode,
    #[arg(long = "cache", help = cache_help(
        "A cache to compare with float, repeatable [default: the cache of the model's \
         kv_cache.json, if it has one]"
    ))]
    caches: Vec<NamedCache>,
    /// Tokens per eval window; each window starts from an empty cache [default: 2048, or the
    /// model's limit if that is lower].
    #[arg(long, value_parser = at_least::<2>)]
    window: Option<usize>,
    /// Tokens from the start of one eval window to that of the next [default: the window]. With a
    /// smaller stride, windows overlap and each scores only its last tokens. This predicts tokens
    /// from more text but takes longer.
    #[arg(long)]
    stride: Option<usize>,
    /// Read and use only the first tokens of the text [default: all].
    #[arg(long, value_parser = at_least::<2>)]
    tokens: Option<usize>,
    #[command(flatten)]
    json: JsonArgs,
    /// Write report.html and its charts into this folder, with the errors of each layer over the
    /// first eval window.
    #[arg(long, value_name = "FOLDER")]
    report: Option<PathBuf>,
    #[command(flatten)]
    profile: ProfileArgs,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let files = NamedFiles::default().reads("text", &args.text.path);
    policies(files, &args.caches)
        .reads_model("model", args.on.source.given())
        .writes("json", args.json.path())
        .writes("profile", args.profile.path())
        .check()?;
    args.profile.end_on_interrupt()?;
    dispatch!(args.devices.backend(args.on.backend), Plain, run_on(args))
}

fn run_on<T: Target>(args: &Args) -> Result<()> {
    let mut profile = args.profile.start()?;
    let devices: Vec<On<T>> = args.devices.open()?;
    let device = &devices[0];
    profile.device(device)?;
    let output = Output::open(&args.json, args.report.as_deref())?;
    let window = args.window.unwrap_or(WINDOW);
    let window = window.min(args.tokens.unwrap_or(usize::MAX));
    let caches = configs(&args.caches).into_iter();
    // The float cache always runs and is the largest.
    let caches = caches.chain([KvCacheConfig::float().into()]);
    let batch = args.devices.sharing_memory();
    // Those with the float cache, those to compare, and a copy in f32.
    let logits = 3 * batch * window.min(HEAD_ROWS);
    let request = MemoryRequest::new(caches, window).in_one_pass().with_batch(batch);
    let request = MemoryRequest { logits, ..request };
    let (Source { model, tokenizer, name, cache, notes }, budget) =
        source::load(&args.on, Weights::Restored, request, device)?;
    profile.model(&model, &name);
    let TextIds { ids, bytes, bos } = args.text.read(&tokenizer, args.tokens)?;
    let window = args.window.unwrap_or_else(|| model.max_positions().min(WINDOW));
    let mut caches = configs(&args.caches);
    for Named { name, value: config } in &args.caches {
        if name != "float" && config.is_float(model.spec()) {
            note(format_args!("{name} is the float cache, which always has a row"));
        }
    }
    if let (true, Some(cache)) = (caches.is_empty(), cache) {
        note(format_args!("comparing float with {cache}, from the model's {KV_CACHE_FILE}"));
        caches.push(cache);
    }
    note_policies(&caches, model.spec());
    let mut plan =
        Plan::new(&model, args.mode, caches, ids, window, args.tokens)?.with_bos(&model, bos)?;
    if let Some(stride) = args.stride {
        plan = plan.with_stride(stride)?;
    }
    let jobs = [Job { model: &model, name, plan }];
    let bos = bos.and_then(|bos| tokenizer.id_to_token(bos));
    let text = Text { name: text_name(&args.text.path), bytes, bos, notes };
    evaluate_and_report(&devices[..], text, &jobs, Some(&budget), output)?;
    profile.finish()
}
