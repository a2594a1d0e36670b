//! `kv-eval index`: measures the recall of a model's indexers with quantized keys.

use std::path::PathBuf;

use anyhow::Result;
use kv_cli::{
    MemoryRequest, ModelArgs, NamedFiles, OutFile, Plain, Weights, count_bar, dispatch,
    exit_on_interrupt,
    source::{self, Source},
};
use kv_cubecl::{KvCacheConfig, KvFormat, On, Target};
use kv_eval::{KeyFormat, Mode, Plan, index_recall};
use kv_models::ModelCacheConfig;

use crate::{
    arguments::{TextArgs, TextIds, at_least, quantized_format},
    json::{JsonArgs, show},
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kv-eval index --model runs/sparse/model --text novel.txt
  kv-eval index -m DeepSeek-V4-Flash -f novel.txt --keys e2m1b --tokens 8192 --plot recall.svg")]
pub(crate) struct Args {
    #[command(flatten)]
    on: ModelArgs,
    #[command(flatten)]
    text: TextArgs,
    /// Format of the keys, with and without a Hadamard transform: e4m3b, e2m1b, int8, 4, ..;
    /// repeatable.
    #[arg(long = "keys", value_parser = quantized_format, default_values = ["e4m3b", "e2m1b"])]
    keys: Vec<KvFormat>,
    /// Tokens of the text.
    #[arg(long, default_value_t = 8192)]
    tokens: usize,
    /// Tokens per window; each window starts from an empty cache [default: the model's limit, at
    /// most 4096].
    #[arg(long, value_parser = at_least::<2>)]
    window: Option<usize>,
    /// Write a chart of recall by entries to this SVG file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArgs,
}

/// Default tokens of a window, unless the model has fewer positions.
const WINDOW: usize = 4096;

pub(crate) fn run(args: &Args) -> Result<()> {
    NamedFiles::default()
        .reads("text", &args.text.path)
        .reads_model("model", args.on.source.given())
        .writes("plot", args.plot.as_deref())
        .writes("json", args.json.path())
        .check()?;
    exit_on_interrupt()?;
    dispatch!(args.on.backend, Plain, run_on(args))
}

fn run_on<T: Target>(args: &Args) -> Result<()> {
    let device = On::<T>::open()?;
    let plot = args.plot.as_ref().map(|path| OutFile::open("plot", path)).transpose()?;
    let (screen, json) = args.json.open()?;
    let window = args.window.unwrap_or(WINDOW);
    let request = MemoryRequest::new([KvCacheConfig::float()], window).in_one_pass();
    let (Source { model, tokenizer, .. }, _) =
        source::load(&args.on, Weights::Restored, request, &device)?;
    let TextIds { ids, bos, .. } = args.text.read(&tokenizer, Some(args.tokens))?;
    let window = args.window.unwrap_or_else(|| model.max_positions().min(WINDOW));
    let none: [ModelCacheConfig; 0] = [];
    let plan = Plan::new(&model, Mode::Parallel, none, ids, window, None)?.with_bos(&model, bos)?;
    let keys = args.keys.iter();
    let formats: Vec<KeyFormat> = keys
        .flat_map(|&codes| [false, true].map(|hadamard| KeyFormat { codes, hadamard }))
        .collect();
    let bar = count_bar();
    let found = index_recall(&device, &model, &plan, &formats, |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    let found = found?;
    // An output that cannot be written is reported after the others are written.
    let plotted = plot.map_or(Ok(()), |file| file.write(found.chart().svg()?.as_bytes()));
    let shown = show(screen, json, &found);
    plotted.and(shown)
}
