//! What the commands share: arguments, running plans, and where results go.

use std::{fs, path::Path, time::Instant};

use anyhow::{Context, Result};
use indicatif::ProgressBar;
use kv_cli::{Backend, token_bar};
use kv_cubecl::{On, Target};
use kv_eval::{Plan, Progress, Report, Run, evaluate, layers::measure_layers};
use kv_models::{LanguageModel, Tokenizer};
use serde::Serialize;

/// Which model, and where it runs.
#[derive(Debug, clap::Args)]
pub(crate) struct ModelArgs {
    /// A folder with config.json, a .gguf file, or a Hugging Face model id.
    #[arg(long)]
    pub(crate) model: String,
    /// Where to run.
    #[arg(long, value_enum, default_value = "flex")]
    pub(crate) backend: Backend,
}

/// A model, its name, and what to evaluate with it.
pub(crate) struct Job<'a> {
    pub(crate) model: &'a LanguageModel,
    pub(crate) name: String,
    pub(crate) plan: Plan,
}

impl Job<'_> {
    fn tokens(&self) -> usize {
        self.plan.scored_tokens() * self.plan.caches().len()
    }

    fn run<T: Target>(&self, device: &On<T>, layers: bool, bar: &ProgressBar) -> Result<Vec<Run>> {
        let start = bar.position();
        let set = |progress: Progress<'_>| {
            let figures = progress.perplexities.iter();
            let figures: Vec<_> = figures.map(|(cache, x)| format!("{cache} {x:.4}")).collect();
            bar.set_message(figures.join("  "));
            bar.set_position(start + progress.done as u64);
        };
        let mut runs = evaluate(device, self.model, &self.plan, set)?;
        if layers {
            measure_layers(device, self.model, &self.plan, &mut runs)?;
        }
        Ok(runs)
    }
}

/// Where the results of evaluations go, beside the terminal.
pub(crate) struct Output<'a> {
    pub(crate) json: Option<&'a Path>,
    pub(crate) folder: Option<&'a Path>,
}

/// Runs `jobs`, whose plans are of the same tokens of one text, which stand for `bytes` bytes of it,
/// and prints and writes their report.
pub(crate) fn evaluate_and_report<T: Target>(
    device: &On<T>,
    text: &Path,
    bytes: usize,
    jobs: &[Job<'_>],
    output: &Output<'_>,
) -> Result<()> {
    let bar = token_bar(jobs.iter().map(Job::tokens).sum());
    let start = Instant::now();
    let plan = jobs.first().map(|job| &job.plan);
    let [tokens, window, stride] =
        [Plan::tokens, Plan::window, Plan::stride].map(|part| plan.map_or(0, part));
    let command = std::env::args().collect();
    let mut report = Report::new(device, command, text.display().to_string(), tokens, window)
        .with_stride(stride)
        .with_text_bytes(bytes);
    for job in jobs {
        report.add(&job.name, job.run(device, output.folder.is_some(), &bar)?);
    }
    bar.finish_and_clear();

    print!("{report}");
    println!("took {:.1} s", start.elapsed().as_secs_f64());
    if let Some(path) = output.json {
        write_json(path, &report)?;
    }
    if let Some(folder) = output.folder {
        let written = report.write_folder(folder)?;
        if let Some(page) = written.first() {
            println!("report: {} and {} charts beside it", page.display(), written.len() / 2);
        }
    }
    Ok(())
}

/// The text to evaluate on.
pub(crate) fn read_text(text: &Path) -> Result<String> {
    fs::read_to_string(text).with_context(|| format!("text {}: cannot read", text.display()))
}

/// The bytes of text that the first `tokens` of `ids` stand for.
pub(crate) fn n_bytes(tokenizer: &Tokenizer, ids: &[u32], tokens: usize) -> Result<usize> {
    Ok(tokenizer.decode(&ids[..tokens.min(ids.len())])?.len())
}

/// Says so if the text has fewer tokens than are asked for.
pub(crate) fn note_short_text(ids: &[u32], tokens: Option<usize>) {
    if let Some(tokens) = tokens.filter(|&tokens| tokens > ids.len()) {
        eprintln!("note: the text has {} tokens, fewer than --tokens {tokens}", ids.len());
    }
}

/// Writes `value` as JSON for people and programs.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let json = serde_json::to_string_pretty(value)?;
    fs::write(path, json + "\n").with_context(|| format!("json {}: cannot write", path.display()))
}
