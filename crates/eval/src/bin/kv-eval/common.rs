//! What the commands share: arguments, running plans, and where results go.

use std::{fs, io, path::Path, time::Instant};

use anyhow::{Context, Result};
use indicatif::ProgressBar;
use kv_cli::{Backend, OutFile, Screen, note, open_folder, token_bar};
use kv_cubecl::{On, Target};
use kv_eval::{Plan, Progress, Report, Run, evaluate, layers::measure_layers};
use kv_models::{LanguageModel, Tokenizer};
use serde::Serialize;

/// Which model, and where it runs.
#[derive(Debug, clap::Args)]
pub(crate) struct ModelArgs {
    /// A folder with config.json, a .gguf file, or a model of the Hugging Face hub: owner/name, or
    /// owner/name/FILE.gguf.
    #[arg(long)]
    pub(crate) model: String,
    /// The branch, tag or commit of a model of the hub.
    #[arg(long)]
    pub(crate) revision: Option<String>,
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
    screen: Screen,
    json: Option<OutFile>,
    folder: Option<&'a Path>,
}

impl<'a> Output<'a> {
    /// Finds out whether a file and a folder can be written.
    pub(crate) fn open(json: Option<&Path>, folder: Option<&'a Path>) -> Result<Self> {
        if let Some(folder) = folder {
            open_folder("report", folder)?;
        }
        let screen = Screen::beside([json]);
        let json = json.map(|path| OutFile::open("json", path)).transpose()?;
        Ok(Self { screen, json, folder })
    }
}

/// Runs `jobs`, whose plans are of the same tokens of one text, which stand for `bytes` bytes of it,
/// and prints and writes their report.
pub(crate) fn evaluate_and_report<T: Target>(
    device: &On<T>,
    text: &Path,
    bytes: usize,
    jobs: &[Job<'_>],
    output: Output<'_>,
) -> Result<()> {
    let Output { screen, json, folder } = output;
    let bar = token_bar(jobs.iter().map(Job::tokens).sum());
    let start = Instant::now();
    let plan = jobs.first().map(|job| &job.plan);
    let [tokens, window, stride] =
        [Plan::tokens, Plan::window, Plan::stride].map(|part| plan.map_or(0, part));
    let command = std::env::args().collect();
    let mut report = Report::new(device, command, text_name(text), tokens, window)
        .with_stride(stride)
        .with_text_bytes(bytes);
    for job in jobs {
        report.add(&job.name, job.run(device, folder.is_some(), &bar)?);
    }
    bar.finish_and_clear();

    // Whatever cannot be written is said after the rest is.
    let mut told = format!("{report}took {:.1} s\n", start.elapsed().as_secs_f64());
    let written = folder.map(|folder| report.write_folder(folder)).transpose();
    if let Ok(Some(files)) = &written
        && let Some(page) = files.first()
    {
        told += &format!("report: {} and {} charts beside it\n", page.display(), files.len() / 2);
    }
    let json = json.map_or(Ok(()), |file| write_json(file, &report));
    screen.print(told)?;
    written?;
    json
}

/// Whether a path means standard input.
fn is_stdin(path: &Path) -> bool {
    path == Path::new("-")
}

/// What a report calls the text.
fn text_name(text: &Path) -> String {
    match is_stdin(text) {
        true => "standard input".into(),
        // As it would be named from here.
        false => {
            let here = std::env::current_dir().unwrap_or_default();
            text.strip_prefix(here).unwrap_or(text).display().to_string()
        }
    }
}

/// The text to evaluate on.
pub(crate) fn read_text(text: &Path) -> Result<String> {
    let read = match is_stdin(text) {
        true => io::read_to_string(io::stdin()),
        false => fs::read_to_string(text),
    };
    read.with_context(|| format!("text {}: cannot read", text.display()))
}

/// The bytes of text that the first `tokens` of `ids` stand for.
pub(crate) fn n_bytes(tokenizer: &Tokenizer, ids: &[u32], tokens: usize) -> Result<usize> {
    Ok(tokenizer.decode(&ids[..tokens.min(ids.len())])?.len())
}

/// Says so if the text has fewer tokens than are asked for.
pub(crate) fn note_short_text(ids: &[u32], tokens: Option<usize>) {
    if let Some(tokens) = tokens.filter(|&tokens| tokens > ids.len()) {
        note(format_args!("the text has {} tokens, fewer than --tokens {tokens}", ids.len()));
    }
}

/// Writes `value` as JSON for people and programs.
pub(crate) fn write_json(file: OutFile, value: &impl Serialize) -> Result<()> {
    file.write((serde_json::to_string_pretty(value)? + "\n").as_bytes())
}
