//! `kv-eval tasks`: accuracy in multiple-choice tasks, and log-likelihoods of continuations.

use std::{
    fs::File,
    io::{BufRead, BufReader, stdin},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use kv_cli::{
    DeviceArgs, MemoryRequest, ModelArgs, NamedFiles, OutFile, Plain, Screen, Weights, cache_help,
    count_bar, dispatch, exit_on_interrupt, note,
    source::{self, Source},
};
use kv_cubecl::{On, Target};
use kv_eval::tasks::{Task, TaskFormat, TaskPlan, TaskReport, score_tasks};
use kv_models::Usage;

use crate::{
    arguments::{NamedCache, at_least, policies, with_float},
    common::{BosArgs, note_policies, text_name},
    json::{JsonArgs, show},
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kv-eval tasks --model models/austen --task lambada_test.jsonl --cache k4v4-gflush
  kv-eval tasks -m SmolLM2-135M.gguf --task hellaswag.jsonl --task arc.jsonl --limit 200
  kv-eval tasks -m owner/name --task mine.jsonl --format choices --items items.jsonl --json -

Files have the format of HellaSwag, ARC, PIQA or LAMBADA on the Hugging Face hub, or
{\"context\": .., \"choices\": [..], \"gold\": 0} and {\"context\": .., \"continuation\": ..}.
Scores equal lm-evaluation-harness's without examples in the context (--num_fewshot 0).")]
pub(crate) struct Args {
    #[command(flatten)]
    on: ModelArgs,
    #[command(flatten)]
    devices: DeviceArgs,
    /// A file with one JSON object per line, or - for standard input; repeatable.
    #[arg(long = "task", value_name = "FILE", required = true)]
    tasks: Vec<PathBuf>,
    /// Format of the files: hellaswag, arc, piqa, lambada, choices or continuation [default: by the
    /// fields of the first line].
    #[arg(long)]
    format: Option<TaskFormat>,
    #[arg(long = "cache", help = cache_help("A cache beside the float one, repeatable"))]
    caches: Vec<NamedCache>,
    /// Read and use only the first items of each file [default: all].
    #[arg(long, value_parser = at_least::<1>)]
    limit: Option<usize>,
    #[command(flatten)]
    bos: BosArgs,
    #[command(flatten)]
    json: JsonArgs,
    /// Write the log-likelihoods and the answer of each item and cache to this file, one JSON
    /// object per line; - for standard output.
    #[arg(long, value_name = "FILE")]
    items: Option<PathBuf>,
}

/// Bytes of text per token, more than in most texts. The memory that the tasks really need is
/// checked once they are tokens.
const BYTES_PER_TOKEN: usize = 8;

pub(crate) fn run(args: &Args) -> Result<()> {
    let files = args.tasks.iter().fold(NamedFiles::default(), |it, path| it.reads("task", path));
    policies(files, &args.caches)
        .reads_model("model", args.on.source.given())
        .writes("json", args.json.path())
        .writes("items", args.items.as_deref())
        .check()?;
    exit_on_interrupt()?;
    let read = |path: &PathBuf| read(path, args.format, args.limit);
    let tasks = args.tasks.iter().map(read).collect::<Result<_>>()?;
    dispatch!(args.devices.backend(args.on.backend), Plain, run_on(args, tasks))
}

fn read(path: &Path, format: Option<TaskFormat>, limit: Option<usize>) -> Result<Task> {
    let reader: Box<dyn BufRead> = match path == Path::new("-") {
        true => Box::new(stdin().lock()),
        false => {
            let file = File::open(path);
            let file = file.with_context(|| format!("task {}: cannot read", path.display()))?;
            Box::new(BufReader::new(file))
        }
    };
    Ok(Task::read(reader, &text_name(path), format, limit)?)
}

fn run_on<T: Target>(args: &Args, tasks: Vec<Task>) -> Result<()> {
    let devices: Vec<On<T>> = args.devices.open()?;
    let (_, json) = args.json.open()?;
    let items = args.items.as_deref().map(|path| OutFile::open("items", path)).transpose()?;
    let screen = Screen::beside([args.json.path(), args.items.as_deref()]);
    let caches = with_float(&args.caches);
    let longest = tasks.iter().map(Task::longest).max().unwrap_or(0) / BYTES_PER_TOKEN;
    let batch = args.devices.sharing_memory();
    let request = MemoryRequest::new(caches.iter().cloned(), longest.max(1)).in_one_pass();
    let request = request.with_batch(batch);
    let (Source { model, tokenizer, .. }, budget) =
        source::load(&args.on, Weights::Restored, request, &devices[0])?;
    note_policies(&caches, model.spec());
    let plan = TaskPlan::new(&model, &tokenizer, caches, tasks, args.bos.choose(&tokenizer)?)?;
    for cache in plan.caches() {
        let usage = Usage::new(cache.clone()).with_batch(batch).with_pass(plan.longest());
        budget.check(model.spec(), &usage)?;
    }
    if plan.truncated() > 0 {
        note(format_args!(
            "{} of {} continuations have more tokens than the model's {} positions; their contexts \
             lose the first ones",
            plan.truncated(),
            plan.continuations(),
            model.max_positions()
        ));
    }
    let bar = count_bar();
    bar.set_length(plan.continuations().saturating_mul(plan.caches().len()) as u64);
    let scores = score_tasks(&devices[..], &model, &plan, || bar.inc(1));
    bar.finish_and_clear();
    let report = TaskReport::new(&plan, scores?);
    // An output that cannot be written is reported after the others are written.
    let lines = report.items_jsonl()?;
    let written = items.map_or(Ok(()), |file| file.write(lines.as_bytes()));
    show(screen, json, &report)?;
    written
}
