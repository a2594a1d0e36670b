//! Shared by the commands: arguments, evaluation of plans, and outputs.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
    time::Instant,
};

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use indicatif::ProgressBar;
use kv_cli::{
    MemoryBudget, OutFile, Screen, check_folder, memory_limit, note, token_bar, uninterrupted,
};
use kv_cubecl::Target;
use kv_eval::{
    Devices, Plan, Progress, Report, Run, evaluate, layers::measure_layers, memory::DeviceUse,
};
use kv_models::{
    LanguageModel, ModelCacheConfig, ModelSpec, Tokenizer, decimal_size, tokenizer::Piece,
};

use crate::json::{JsonArgs, write_json};

/// The way decode steps are sent to a device.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct StepArgs {
    /// Capture the decode step once and replay it. This is the default on CUDA and WGPU, except for
    /// short texts and for mixtures of experts.
    #[arg(long, alias = "recorded", conflicts_with = "launched")]
    graph_capture: bool,
    /// Launch each decode step without graph capture.
    #[arg(long)]
    launched: bool,
}

impl StepArgs {
    /// Returns whether to capture decode steps; `None` to capture them if that is faster.
    pub(crate) fn graph_capture(self) -> Option<bool> {
        (self.graph_capture || self.launched).then_some(self.graph_capture)
    }
}

/// Arguments that decide whether texts start with the model's begin-of-text token.
#[derive(Debug, clap::Args)]
pub(crate) struct BosArgs {
    /// Start with the begin-of-text token [default: as the model's files say].
    #[arg(long, overrides_with = "no_bos")]
    bos: bool,
    /// Start without a begin-of-text token.
    #[arg(long)]
    no_bos: bool,
}

impl BosArgs {
    /// Returns whether the user decided, rather than the model's files.
    pub(crate) fn is_given(&self) -> bool {
        self.bos || self.no_bos
    }

    /// Returns the token to start with, if any.
    pub(crate) fn choose(&self, tokenizer: &Tokenizer) -> Result<Option<u32>> {
        let bos = tokenizer.bos();
        if self.bos && bos.is_none() {
            bail!("bos: the model's tokenizer has no begin-of-text token; run without --bos");
        }
        let adds = self.bos || tokenizer.adds_bos() && !self.no_bos;
        Ok(bos.filter(|_| adds))
    }
}

pub(crate) struct Job<'a> {
    pub(crate) model: &'a LanguageModel,
    pub(crate) name: String,
    pub(crate) plan: Plan,
}

impl Job<'_> {
    fn tokens(&self) -> usize {
        self.plan.scored_tokens() * self.plan.caches().len()
    }

    fn run<T: Target>(
        &self,
        devices: Devices<'_, T>,
        layers: bool,
        bar: &ProgressBar,
    ) -> Result<Vec<Run>> {
        let start = bar.position();
        let set = |progress: Progress<'_>| {
            let figures = progress.perplexities.iter();
            let figures: Vec<_> = figures.map(|(cache, x)| format!("{cache} {x:.4}")).collect();
            bar.set_message(figures.join("  "));
            bar.set_position(start + progress.done as u64);
        };
        let mut runs = evaluate(devices, self.model, &self.plan, set)?;
        if layers {
            measure_layers(devices.first(), self.model, &self.plan, &mut runs)?;
        }
        Ok(runs)
    }
}

pub(crate) struct Output<'a> {
    screen: Screen,
    json: Option<OutFile>,
    folder: Option<&'a Path>,
}

impl<'a> Output<'a> {
    pub(crate) fn open(json: &JsonArgs, folder: Option<&'a Path>) -> Result<Self> {
        if let Some(folder) = folder {
            check_folder("report", folder)?;
        }
        let (screen, json) = json.open()?;
        Ok(Self { screen, json, folder })
    }
}

pub(crate) struct Text {
    /// Name of the text in the report.
    pub(crate) name: String,
    /// Bytes that its tokens encode.
    pub(crate) bytes: usize,
    /// Spelling of the token that eval windows start with.
    pub(crate) bos: Option<String>,
    /// Notes on the models for the user.
    pub(crate) notes: Vec<String>,
}

/// Runs `jobs` on the same tokens of `text`, and prints and writes their report, with the plan of
/// `budget` beside the memory of the first device.
pub(crate) fn evaluate_and_report<'a, T: Target>(
    devices: impl Into<Devices<'a, T>>,
    text: Text,
    jobs: &[Job<'_>],
    budget: Option<&MemoryBudget>,
    output: Output<'_>,
) -> Result<()> {
    let Output { screen, json, folder } = output;
    let devices = devices.into();
    let device = devices.first();
    let bar = token_bar(jobs.iter().map(Job::tokens).sum());
    let start = Instant::now();
    let plan = jobs.first().map(|job| &job.plan);
    let [tokens, window, stride] =
        [Plan::tokens, Plan::window, Plan::stride].map(|part| plan.map_or(0, part));
    let command = kv_cli::command_line();
    let mut report = Report::new(device, command, text.name, tokens, window)
        .with_stride(stride)
        .with_bos(text.bos)
        .with_notes(text.notes)
        .with_text_bytes(text.bytes);
    for job in jobs {
        report.add(&job.name, job.run(devices, folder.is_some(), &bar)?);
    }
    bar.finish_and_clear();
    report.device_memory =
        budget.map_or_else(|| DeviceUse::now(device), |budget| budget.device_use(device));

    // An output that cannot be written is reported after the others are written.
    let mut summary = format!("{report}took {:.1} s\n", start.elapsed().as_secs_f64());
    let write = |folder: &Path| uninterrupted(|| report.write_folder(folder));
    let written = folder.map(write).transpose();
    if let Ok(Some(files)) = &written
        && let Some(page) = files.first()
    {
        summary +=
            &format!("report: {} and {} charts beside it\n", page.display(), files.len() / 2);
    }
    let json = json.map_or(Ok(()), |file| write_json(file, &report));
    screen.print(summary)?;
    written?;
    json
}

fn is_stdin(path: &Path) -> bool {
    path == Path::new("-")
}

pub(crate) fn text_name(text: &Path) -> String {
    match is_stdin(text) {
        true => "standard input".into(),
        // Relative to the current folder.
        false => {
            let here = std::env::current_dir().unwrap_or_default();
            text.strip_prefix(here).unwrap_or(text).display().to_string()
        }
    }
}

/// Reads at most the first `tokens` of a text. Returns their ids and the bytes of text they encode.
/// The rest of the text is not read.
pub(crate) fn read_ids(
    text: &Path,
    tokenizer: &Tokenizer,
    tokens: Option<usize>,
) -> Result<(Vec<u32>, usize)> {
    ids_of(open_text(text).with_context(|| cannot_read(text))?, text, tokenizer, tokens)
}

fn open_text(text: &Path) -> io::Result<Box<dyn Read>> {
    Ok(match is_stdin(text) {
        true => Box::new(io::stdin().lock()),
        false => Box::new(File::open(text)?),
    })
}

/// Reads a whole text, or standard input for `-`. Messages name the `option` that gave its path.
pub(crate) fn read_text(option: &str, text: &Path) -> Result<String> {
    /// The most bytes, so that no endless file fills the memory.
    const MOST: u64 = 1 << 30;
    let (cannot, mut whole) = (|| format!("{option} {}: cannot read", text.display()), vec![]);
    let mut reader = open_text(text).with_context(cannot)?.take(MOST + 1);
    if reader.read_to_end(&mut whole).with_context(cannot)? as u64 > MOST {
        bail!("{option} {}: must have at most {MOST} bytes", text.display());
    }
    String::from_utf8(whole).map_err(|error| error.utf8_error()).with_context(cannot)
}

fn cannot_read(text: &Path) -> String {
    format!("text {}: cannot read", text.display())
}

/// Does the same as [`read_ids`] with the contents of `reader`, which messages call `text`.
pub(crate) fn ids_of(
    reader: Box<dyn Read + '_>,
    text: &Path,
    tokenizer: &Tokenizer,
    tokens: Option<usize>,
) -> Result<(Vec<u32>, usize)> {
    let cannot = || cannot_read(text);
    let (limit, mut ids, mut bytes) = (tokens.unwrap_or(usize::MAX), vec![], 0);
    for piece in tokenizer.pieces(reader, text) {
        let Piece { text, continues } = piece.with_context(cannot)?;
        let new = tokenizer.encode_piece(&text, continues)?;
        let room = limit - ids.len();
        if new.len() >= room {
            ids.extend_from_slice(&new[..room]);
            bytes += tokenizer.decode(&new[..room])?.len();
            break;
        }
        ids.extend(new);
        bytes += text.len();
    }
    Ok((ids, bytes))
}

pub(crate) fn note_short_text(ids: &[u32], tokens: Option<usize>) {
    if let Some(tokens) = tokens.filter(|&tokens| tokens > ids.len()) {
        note(format_args!("the text has {} tokens, fewer than --tokens {tokens}", ids.len()));
    }
}

/// Prints notes on caches that do not suit layers of the model, and the cache of each layer for
/// caches that differ by layer.
pub(crate) fn note_policies<'a>(
    caches: impl IntoIterator<Item = &'a ModelCacheConfig>,
    spec: &ModelSpec,
) {
    for cache in caches {
        cache.notes(spec).iter().for_each(note);
        cache.in_full(spec).iter().for_each(note);
    }
}

/// Checks that `needed` and `beside` bytes of memory are available, before any are allocated.
///
/// # Errors
/// Too little memory; the message names both sizes and `remedy`.
pub(crate) fn check_memory(needed: u64, beside: u64, device: &Device, remedy: &str) -> Result<()> {
    let limit = memory_limit(None, device);
    match limit.total {
        Some(total) if needed.saturating_add(beside) > total => {
            let [needed, total] = [needed, total].map(decimal_size);
            bail!("memory: needs {needed}, but {} is {total}; {remedy}", limit.source)
        }
        _ => Ok(()),
    }
}
