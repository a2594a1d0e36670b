//! `kv-eval needle`: hides passages or answers in a long text, and asks for them.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use kv_cli::{
    MemoryRequest, ModelArgs, NamedFiles, Plain, Weights, cache_help, check_folder, command_line,
    count_bar, dispatch, exit_on_interrupt, note,
    source::{self, Source},
    uninterrupted,
};
use kv_cubecl::{On, Target};
use kv_eval::{Haystack, NeedlePlan, NeedleType, RetrievalPlan, RetrievalTask, needles, retrieval};

use crate::{
    arguments::{NamedCache, at_least, policies, with_float},
    common::{BosArgs, note_policies, note_short_text, read_ids, read_text, text_name},
    json::{JsonArgs, show},
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kv-eval needle --model models/austen --text models/austen/heldout.txt --cache k4v4-gflush
  kv-eval needle -m SmolLM2-135M.gguf -f novel.txt --context 2048 --chunks 8 --cache k2v2-s4
  kv-eval needle -m SmolLM2-135M.gguf --task single,multi-key --context 2048,8192 --cache k2v2")]
pub(crate) struct Args {
    #[command(flatten)]
    on: ModelArgs,
    /// A UTF-8 text file, or - for standard input: the text to hide passages in, or with --task the
    /// haystack.
    #[arg(long, short = 'f', value_name = "TEXT", required_unless_present = "tasks")]
    text: Option<PathBuf>,
    #[arg(long = "cache", help = cache_help("A cache beside the float one, repeatable"))]
    caches: Vec<NamedCache>,
    /// Tokens of a prompt; with --task, of prompt and answer, comma-separated.
    #[arg(long, default_value = "1024", value_delimiter = ',', value_parser = at_least::<1>)]
    context: Vec<usize>,
    #[command(flatten)]
    passages: PassageArgs,
    #[command(flatten)]
    tasks: TaskArgs,
    #[command(flatten)]
    json: JsonArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Passages (default)")]
struct PassageArgs {
    /// Tokens of a needle.
    #[arg(long, default_value_t = 48, conflicts_with = "tasks")]
    needle: usize,
    /// First tokens of the needle that the prompt repeats last; the others are to be predicted.
    #[arg(long, default_value_t = 16, conflicts_with = "tasks")]
    cue: usize,
    /// Number of equal parts of the text, each with a place for a needle.
    #[arg(long, default_value_t = 16, conflicts_with = "tasks")]
    chunks: usize,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Generated answers (--task)")]
struct TaskArgs {
    #[command(flatten)]
    bos: BosArgs,
    /// Tasks to run, comma-separated. Needles are sentences "the special magic number for KEY is:
    /// VALUE", in a haystack of other sentences.
    #[arg(id = "tasks", long = "task", value_enum, value_delimiter = ',', value_name = "TASK")]
    tasks: Vec<RetrievalTask>,
    /// Type of keys; tool-call has none.
    #[arg(long, value_enum, default_value = "word", requires = "tasks")]
    keys: NeedleType,
    /// Type of values; tool-call has none.
    #[arg(long, value_enum, default_value = "number", requires = "tasks")]
    values: NeedleType,
    /// Sentences around the needles [default: the sentences of --text, or noise].
    #[arg(long, value_enum, requires = "tasks", conflicts_with = "text")]
    haystack: Option<Hay>,
    /// Number of needles in multi-key, multi-value and multi-query.
    #[arg(long, default_value_t = 4, requires = "tasks")]
    count: usize,
    /// Places of the needle in percent of the haystack, comma-separated. The needles of multi-value
    /// and multi-query are spread evenly instead.
    #[arg(long, value_delimiter = ',', default_value = "0,25,50,75,100", requires = "tasks")]
    depth: Vec<usize>,
    /// Prompts with other needles, for each task, context and depth.
    #[arg(long, default_value_t = 1, requires = "tasks")]
    samples: usize,
    /// Seed of keys, values and random words.
    #[arg(long, default_value_t = 0, requires = "tasks")]
    seed: u64,
    /// Write report.html, a page with heat maps, into this folder, which is created if missing.
    #[arg(long, value_name = "FOLDER", requires = "tasks")]
    report: Option<PathBuf>,
}

/// A haystack that needs no text.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Hay {
    /// A few sentences, repeated as in RULER.
    Noise,
    /// Random words.
    Words,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let files = NamedFiles::default().reads_optional("text", args.text.as_ref());
    let report = args.tasks.report.as_deref().map(|folder| folder.join("report.html"));
    policies(files, &args.caches)
        .reads_model("model", args.on.source.given())
        .writes("report", report.as_deref())
        .writes("json", args.json.path())
        .check()?;
    exit_on_interrupt()?;
    match &args.text {
        Some(text) if args.tasks.tasks.is_empty() => {
            dispatch!(args.on.backend, Plain, passages(args, text))
        }
        _ => dispatch!(args.on.backend, Plain, tasks(args)),
    }
}

fn passages<T: Target>(args: &Args, text: &Path) -> Result<()> {
    let device = On::<T>::open()?;
    let (screen, json) = args.json.open()?;
    if args.tasks.bos.is_given() {
        bail!("bos: applies to generated answers only; add --task, or remove it");
    }
    let [context] = args.context[..] else {
        let given: Vec<_> = args.context.iter().map(usize::to_string).collect();
        bail!("context {}: takes one number without --task", given.join(","));
    };
    let &PassageArgs { needle, cue, chunks } = &args.passages;
    let plan = NeedlePlan { context, needle, cue, chunks };
    let caches = with_float(&args.caches);
    let request = MemoryRequest::new(caches.iter().cloned(), context).in_one_pass();
    let (Source { model, tokenizer, .. }, _) =
        source::load(&args.on, Weights::Restored, request, &device)?;
    note_policies(&caches, model.spec());
    let (ids, _) = read_ids(text, &tokenizer, Some(plan.text()))?;
    note_short_text(&ids, Some(plan.text()));
    let bar = count_bar();
    bar.set_length(caches.len().saturating_mul(chunks) as u64);
    let found = needles(&device, &model, &ids, &caches, plan, |_| bar.inc(1));
    bar.finish_and_clear();
    let found = found?;
    show(screen, json, &found)
}

fn tasks<T: Target>(args: &Args) -> Result<()> {
    let TaskArgs { tasks, haystack, depth, samples, count, seed, report, .. } = &args.tasks;
    let haystack = match (&args.text, haystack) {
        (Some(path), _) => Haystack::from_text(text_name(path), &read_text("text", path)?),
        (None, Some(Hay::Words)) => Haystack::Words,
        (None, _) => Haystack::Noise,
    };
    let device = On::<T>::open()?;
    if let Some(folder) = report {
        check_folder("report", folder)?;
    }
    let (screen, json) = args.json.open()?;
    let caches = with_float(&args.caches);
    let most = args.context.iter().copied().max().unwrap_or(0);
    let request =
        MemoryRequest { generates: true, ..MemoryRequest::new(caches.iter().cloned(), most) };
    let (Source { model, tokenizer, .. }, _) =
        source::load(&args.on, Weights::Packed, request, &device)?;
    note_policies(&caches, model.spec());
    let plan = RetrievalPlan {
        tasks: tasks.clone(),
        keys: args.tasks.keys,
        values: args.tasks.values,
        haystack,
        contexts: args.context.clone(),
        depths: depth.clone(),
        count: *count,
        samples: *samples,
        seed: *seed,
        bos: args.tasks.bos.choose(&tokenizer)?,
    };
    let bar = count_bar();
    bar.set_length(plan.prompts().saturating_mul(caches.len()) as u64);
    let found = retrieval(&device, &model, &tokenizer, &caches, plan, |_| bar.inc(1));
    bar.finish_and_clear();
    let found = found?;
    // An output that cannot be written is reported after the others are written.
    let write = |folder: &PathBuf| uninterrupted(|| found.write_folder(folder, &command_line()));
    let written = report.as_ref().map(write);
    show(screen, json, &found)?;
    if let Some(page) = written.transpose()? {
        note(format_args!("report: {}", page.display()));
    }
    Ok(())
}
