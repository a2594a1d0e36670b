//! `kv-eval search`: finds the best per-layer cache policy within a byte budget.

use std::{
    ops::ControlFlow,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use anyhow::{Context, Result, bail};
use kv_cli::{
    DeviceArgs, MemoryRequest, MemorySize, ModelArgs, NamedFiles, OutFile, Plain, Screen, Weights,
    count_bar, dispatch, exit_interrupted, on_interrupt,
    source::{self, Source},
};
use kv_cubecl::{KvCacheConfig, KvFormat, On, Target};
use kv_eval::{
    Devices, Error, Mode, Plan,
    search::{Found, SearchPlan, search},
};
use kv_models::{LanguageModel, ModelCacheConfig};

use crate::{
    arguments::{TextArgs, TextIds, at_least, quantized_format},
    common::note_policies,
    json::{JsonArgs, write_json},
    policy_file::PolicyFile,
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kv-eval search -m models/austen -f novel.txt --bytes 195KiB -c 1024 --base k4v4-r32-f16
  kv-eval search -m SmolLM2-135M.gguf -f novel.txt --bytes 18.8M --out small.toml")]
pub(crate) struct Args {
    #[command(flatten)]
    on: ModelArgs,
    #[command(flatten)]
    devices: DeviceArgs,
    #[command(flatten)]
    text: TextArgs,
    /// Byte budget of the caches of all layers for --context tokens, such as 12M or 10.5MiB.
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    bytes: MemorySize,
    /// Tokens that --bytes applies to [default: 4096, or the model's limit if that is lower].
    #[arg(long, short)]
    context: Option<usize>,
    /// Cache that gives all layers their options except the formats: groups, residual, sinks,
    /// hadamard and float type.
    #[arg(long, default_value = "k4v4-g64-r64-s4-gflush-hadv-f16")]
    base: KvCacheConfig,
    /// Format to choose from for each side of each layer, in addition to float: 2, 3, 4, 8, int8,
    /// e4m3, ..; repeatable.
    #[arg(long = "format", value_parser = quantized_format, default_values = ["4", "2"])]
    formats: Vec<KvFormat>,
    /// Number of first tokens of the text, which the search uses.
    #[arg(long, default_value_t = 1024)]
    tokens: usize,
    /// Number of tokens after them. The results are compared on them, but the search does not use
    /// them.
    #[arg(long, default_value_t = 4096)]
    unseen_tokens: usize,
    /// Tokens per eval window; each window starts from an empty cache [default: 1024, or the
    /// model's limit if that is lower].
    #[arg(long, value_parser = at_least::<2>)]
    window: Option<usize>,
    /// Name of the policy.
    #[arg(long, default_value = "found")]
    name: String,
    /// File of the policy, .toml or .json.
    #[arg(long, value_name = "FILE", default_value = "policy.toml")]
    out: PathBuf,
    /// Write a chart of divergence by bytes to this SVG file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArgs,
}

fn bytes(text: &str) -> Result<MemorySize, String> {
    match text.parse::<u64>() {
        Ok(bytes) if bytes > 0 => Ok(MemorySize(bytes)),
        _ => text.parse(),
    }
}

/// Default tokens of an eval window and of the context, unless the model has fewer positions.
const WINDOW: usize = 1024;
const CONTEXT: usize = 4096;

/// Handles Ctrl-C, which ends the program, or a running search at its next eval window.
#[derive(Clone, Default)]
struct Interrupt {
    searching: Arc<AtomicBool>,
    asked: Arc<AtomicBool>,
}

impl Interrupt {
    fn listen() -> Result<Self> {
        let this = Self::default();
        let Self { searching, asked } = this.clone();
        on_interrupt(move || {
            if !searching.load(Ordering::SeqCst) || asked.swap(true, Ordering::SeqCst) {
                exit_interrupted();
            }
        })?;
        Ok(this)
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    NamedFiles::default()
        .reads("text", &args.text.path)
        .reads_model("model", args.on.source.given())
        .writes("out", Some(&args.out))
        .writes("plot", args.plot.as_deref())
        .writes("json", args.json.path())
        .check()?;
    dispatch!(args.devices.backend(args.on.backend), Plain, run_on(args))
}

fn run_on<T: Target>(args: &Args) -> Result<()> {
    let interrupt = Interrupt::listen()?;
    let devices: Vec<On<T>> = args.devices.open()?;
    // An invalid name is refused before the search.
    ModelCacheConfig::from(args.base).with_name(&args.name)?;
    let out = PolicyFile::open("out", &args.out)?;
    let plot = args.plot.as_ref().map(|path| OutFile::open("plot", path)).transpose()?;
    let (screen, json) = args.json.open()?;

    let window = args.window.unwrap_or(WINDOW);
    let request = MemoryRequest::new([KvCacheConfig::float()], window).in_one_pass();
    let request = request.with_batch(args.devices.sharing_memory());
    let (Source { model, tokenizer, .. }, _) =
        source::load(&args.on, Weights::Restored, request, &devices[0])?;
    let all = args.tokens.checked_add(args.unseen_tokens).context("tokens: too many; use fewer")?;
    let TextIds { ids, bos, .. } = args.text.read(&tokenizer, Some(all))?;
    let (seen, unseen) = ids.split_at(args.tokens.min(ids.len()));
    let window = args.window.unwrap_or_else(|| model.max_positions().min(WINDOW));
    let text = |name: &str, ids: &[u32]| {
        let none: [ModelCacheConfig; 0] = [];
        Plan::new(&model, Mode::Parallel, none, ids.to_vec(), window, None)
            .and_then(|plan| plan.with_bos(&model, bos))
            .with_context(|| format!("{name} of {}", args.text.path.display()))
    };
    let plan = SearchPlan {
        base: args.base.with_capacity(args.context(&model)?),
        formats: args.formats.clone(),
        bytes: usize::try_from(args.bytes.0).unwrap_or(usize::MAX),
        name: args.name.clone(),
        seen: text("the searched part", seen)?,
        unseen: text("the unseen part", unseen)?,
    };
    let start = Instant::now();
    let Some(found) = searched(Devices::from(&devices[..]), &model, &plan, &interrupt)? else {
        exit_interrupted()
    };

    // An output that cannot be written is reported after the others are written.
    let written = out.write(&found.policy);
    let plotted = plot.map_or(Ok(()), |file| file.write(found.chart().svg()?.as_bytes()));
    let json = json.map_or(Ok(()), |file| write_json(file, &found));
    screen.print(&found)?;
    note_policies([&found.policy], model.spec());
    let seconds = start.elapsed().as_secs_f64();
    screen.line(format_args!(
        "took {seconds:.1} s; {}: {}",
        args.out.display(),
        verdict(&found)
    ))?;
    written.and(plotted).and(json)
}

/// Searches and shows a progress bar. Returns `None`, with a message, if it was interrupted.
fn searched<T: Target>(
    devices: Devices<'_, T>,
    model: &LanguageModel,
    plan: &SearchPlan,
    interrupt: &Interrupt,
) -> Result<Option<Found>> {
    interrupt.searching.store(true, Ordering::SeqCst);
    let bar = count_bar();
    let found = search(devices, model, plan, |progress| {
        bar.set_length(progress.of as u64);
        bar.set_position(progress.done as u64);
        match interrupt.asked.load(Ordering::SeqCst) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    interrupt.searching.store(false, Ordering::SeqCst);
    bar.finish_and_clear();
    match found {
        Err(Error::Stopped) => {
            let (done, of) = (bar.position(), bar.length().unwrap_or(0));
            Screen::Error
                .line(format_args!("stopped after {done} of {of} windows; nothing was written"))?;
            Ok(None)
        }
        found => Ok(Some(found?)),
    }
}

/// Describes the policy found, next to the best cache shared by all layers.
fn verdict(found: &Found) -> String {
    let Some(chosen) = found.chosen() else { return String::new() };
    let kl = chosen.unseen.kl;
    match found.best_uniform() {
        Some(best) => {
            format!("KL {kl:.6} on text that was not seen, {} {:.6}", best.cache, best.unseen.kl)
        }
        None => format!("KL {kl:.6} on text that was not seen; no cache of all layers alike fits"),
    }
}

impl Args {
    fn context(&self, model: &LanguageModel) -> Result<usize> {
        let most = model.max_positions();
        let context = self.context.unwrap_or_else(|| CONTEXT.min(most));
        match (1..=most).contains(&context) {
            true => Ok(context),
            false => bail!("context {context}: must be 1 to {most}, the model's limit"),
        }
    }
}
