//! `kv-eval bench`: what caches cost and save in time.

use std::path::{Path, PathBuf};

use anyhow::Result;
use burn::tensor::Device;
use indicatif::ProgressBar;
use kv_cli::{Backend, OutFile, Plain, Screen, dispatch, note};
use kv_cubecl::{KvCacheConfig, On, Target};
use kv_eval::bench::{
    AttentionPlan, DecodePoint, DecodeSubject, Timing, copy_bandwidth, time_append, time_codec,
    time_decode, time_decode_attention, time_prefill, timed_steps,
};
use kv_models::LanguageModel;
use kv_report::{
    Table,
    chart::{Chart, Series, Style},
};
use serde::Serialize;

use crate::{
    ALLOCATOR,
    common::{ModelArgs, write_json},
    source,
};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Bench {
    /// One layer's attention over caches of growing length: bytes read per second, and their share
    /// of what copying memory reaches.
    DecodeAttention(AttentionArgs),
    /// Decode steps of a whole model by context length.
    Decode(DecodeArgs),
    /// Prompts passed into an empty cache.
    Prefill(PrefillArgs),
    /// Appending a token, and the steps in which the keys of the window are flushed.
    Flush(LayerArgs),
    /// Quantizing and restoring whole tensors.
    Quantize(CodecArgs),
}

/// What every benchmark takes.
#[derive(Debug, clap::Args)]
struct Common {
    /// Where to run.
    #[arg(long, value_enum, default_value = "flex")]
    backend: Backend,
    /// Samples; the median counts.
    #[arg(long, default_value_t = 21)]
    samples: usize,
    /// Write the points here as JSON; with -, to standard output, and the table to standard error.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// One layer's caches, and the lengths they are timed at.
#[derive(Debug, clap::Args)]
pub(crate) struct LayerArgs {
    #[command(flatten)]
    common: Common,
    /// A cache to time; repeatable. The first is what the others are compared with.
    #[arg(long = "cache", default_values = ["float", "float-f16", "k8v8", "k4v4", "k2v2"])]
    caches: Vec<KvCacheConfig>,
    /// Context lengths to time at.
    #[arg(long, value_delimiter = ',', default_value = "1024,2048,4096,8192,16384,32768")]
    contexts: Vec<usize>,
    /// Sequences.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Query heads; the shape by default is that of SmolLM2-135M.
    #[arg(long, default_value_t = 9)]
    heads: usize,
    /// Key and value heads.
    #[arg(long, default_value_t = 3)]
    kv_heads: usize,
    /// Channels per head.
    #[arg(long, default_value_t = 64)]
    head_dim: usize,
}

#[derive(Debug, clap::Args)]
pub(crate) struct AttentionArgs {
    #[command(flatten)]
    layer: LayerArgs,
    /// Tokens that are appended and attend at once.
    #[arg(long, default_value_t = 1)]
    tokens: usize,
    /// Megabytes of cache that one sample reads at least: more than the processor's caches hold.
    #[arg(long, default_value_t = 128)]
    working_set: usize,
    /// Record the launches once and replay them, on devices that can (CUDA, WGPU).
    #[arg(long)]
    recorded: bool,
    /// Draw microseconds by context length here, as SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ModelBench {
    #[command(flatten)]
    on: ModelArgs,
    /// A cache to time; repeatable.
    #[arg(long = "cache", default_values = ["float", "float-f16", "k4v4", "k2v2"])]
    caches: Vec<KvCacheConfig>,
    /// Context lengths to time at, ascending. By default 512, 2048 and 8000, as far as the model goes.
    #[arg(long, value_delimiter = ',')]
    contexts: Option<Vec<usize>>,
    /// Write the points here as JSON; with -, to standard output, and the table to standard error.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw tokens per second by context length here, as SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct DecodeArgs {
    #[command(flatten)]
    bench: ModelBench,
    /// Decode steps per cache and context length; the median counts.
    #[arg(long, default_value_t = 15)]
    samples: usize,
    /// Sequences that take each step together, of lengths that differ by a token each; several numbers are timed
    /// side by side.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    batch: Vec<usize>,
    /// Also time steps that are recorded once and replayed: graphs on CUDA, prepared launches on WGPU.
    #[arg(long)]
    recorded: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct PrefillArgs {
    #[command(flatten)]
    bench: ModelBench,
    /// Times that each prompt is passed, after one pass that measures memory; the median counts.
    #[arg(long, default_value_t = 3)]
    samples: usize,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CodecArgs {
    #[command(flatten)]
    common: Common,
    /// Heads of the tensor.
    #[arg(long, default_value_t = 3)]
    kv_heads: usize,
    /// Tokens of the tensor.
    #[arg(long, default_value_t = 8192)]
    tokens: usize,
    /// Channels per head.
    #[arg(long, default_value_t = 64)]
    head_dim: usize,
    /// Elements per group.
    #[arg(long, default_value_t = 32)]
    group_size: usize,
}

/// What a benchmark writes as JSON.
#[derive(Serialize)]
struct Output<'a, P> {
    command: Vec<String>,
    target: &'static str,
    device: String,
    /// Bytes copied per second, each read once and written once.
    copy_bandwidth: f64,
    points: &'a [P],
}

pub(crate) fn run(bench: &Bench) -> Result<()> {
    match bench {
        Bench::DecodeAttention(args) => {
            dispatch!(args.layer.common.backend, Plain, attention(args))
        }
        Bench::Flush(args) => dispatch!(args.common.backend, Plain, flush(args)),
        Bench::Quantize(args) => dispatch!(args.common.backend, Plain, codec(args)),
        Bench::Decode(args) => dispatch!(args.bench.on.backend, Plain, decode(args)),
        Bench::Prefill(args) => dispatch!(args.bench.on.backend, Plain, prefill(args)),
    }
}

/// Bytes of each buffer that is copied to measure the bandwidth: more than processors' caches hold,
/// and within the size of a buffer that WebGPU lets a kernel bind.
const COPIED: usize = 128 << 20;

/// Where a benchmark's results go.
struct Sinks {
    screen: Screen,
    json: Option<OutFile>,
    plot: Option<OutFile>,
}

impl Sinks {
    /// Opens the outputs, so that a file that cannot be written is reported before the measurement.
    fn open(json: Option<&Path>, plot: Option<&Path>) -> Result<Self> {
        let screen = Screen::beside([json, plot]);
        let open = |name, path: Option<&Path>| path.map(|path| OutFile::open(name, path));
        let (json, plot) = (open("json", json).transpose()?, open("plot", plot).transpose()?);
        Ok(Self { screen, json, plot })
    }

    /// Prints what is timed, then measures and prints the copy bandwidth.
    fn start<T: Target>(&self, device: &On<T>, what: &str) -> Result<f64> {
        self.screen.line(what)?;
        let copied = copy_bandwidth(device, COPIED, 9)?;
        let rate = format!("{} copies {:.1} GB/s", T::NAME, copied / 1e9);
        self.screen.line(format_args!("{rate}: it reads that much and writes as much"))?;
        Ok(copied)
    }

    /// Prints the table and writes what was asked for. If a file cannot be written, the error is
    /// returned after the rest was written.
    fn finish<T: Target, P: Serialize>(
        self,
        device: &On<T>,
        copy_bandwidth: f64,
        table: &Table,
        chart: Option<&Chart>,
        points: &[P],
    ) -> Result<()> {
        let (command, device) = (std::env::args().collect(), format!("{:?}", **device));
        let output = Output { command, target: T::NAME, device, copy_bandwidth, points };
        let json = self.json.map_or(Ok(()), |file| write_json(file, &output));
        let plot = match (self.plot, chart) {
            (Some(file), Some(chart)) => {
                chart.svg().map_err(Into::into).and_then(|svg| file.write(svg.as_bytes()))
            }
            _ => Ok(()),
        };
        self.screen.print(table)?;
        json.and(plot)
    }
}

fn attention<T: Target>(args: &AttentionArgs) -> Result<()> {
    let device = On::<T>::open()?;
    let &AttentionArgs { ref layer, tokens, recorded, .. } = args;
    let working_set = args.working_set << 20;
    let plan = AttentionPlan { tokens, working_set, recorded, ..layer.plan() };
    let how = if recorded { "recorded" } else { "launched" };
    let shape = format!("{}, {tokens} at once, {how}", layer.describe());
    let sinks = Sinks::open(layer.common.json.as_deref(), args.plot.as_deref())?;
    let what = format!("decode attention of one layer on {}: {shape}", T::NAME);
    let copied = sinks.start(&device, &what)?;
    let mut table = Table::new([
        "context", "cache", "us", "10%", "90%", "KB read", "GB/s", "of copy", "speedup",
    ]);
    let mut points = Vec::new();
    let bar = ProgressBar::new(layer.contexts.len() as u64);
    for &context in &layer.contexts {
        let at = time_decode_attention(&device, &plan, &layer.caches, context)?;
        for point in &at {
            table.push([
                context.to_string(),
                point.cache.clone(),
                us(point.seconds.median),
                us(point.seconds.low),
                us(point.seconds.high),
                format!("{:.0}", point.bytes_read as f64 / 1e3),
                format!("{:.2}", point.bandwidth() / 1e9),
                format!("{:.0}%", 100.0 * point.bandwidth() / copied),
                format!("{:.2}", at[0].seconds.median / point.seconds.median),
            ]);
        }
        points.extend(at);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let named = points.iter().map(|p| (p.cache.clone(), p.context, p.seconds.median * 1e6));
    let title = format!("Decode attention on {}: {shape}", T::NAME);
    let chart = by_context(title, "microseconds per layer", true, named);
    sinks.finish(&device, copied, &table, Some(&chart), &points)
}

fn flush<T: Target>(args: &LayerArgs) -> Result<()> {
    let device = On::<T>::open()?;
    let plan = args.plan();
    let sinks = Sinks::open(args.common.json.as_deref(), None)?;
    let what = format!("appending a token to one layer on {}: {}", T::NAME, args.describe());
    let copied = sinks.start(&device, &what)?;
    let mut table = Table::new([
        "context",
        "cache",
        "append us",
        "flush us",
        "step us",
        "flush step us",
        "ratio",
    ]);
    let mut points = Vec::new();
    for &context in &args.contexts {
        for config in &args.caches {
            let point = time_append(&device, &plan, config, context)?;
            let optional = |timing: Option<Timing>| timing.map_or(String::new(), |t| us(t.median));
            let ratio = point.step_flush.map(|t| t.median / point.step.median);
            table.push([
                context.to_string(),
                point.cache.clone(),
                us(point.append.median),
                optional(point.append_flush),
                us(point.step.median),
                optional(point.step_flush),
                ratio.map_or(String::new(), |ratio| format!("{ratio:.2}")),
            ]);
            points.push(point);
        }
    }
    sinks.finish(&device, copied, &table, None, &points)
}

fn codec<T: Target>(args: &CodecArgs) -> Result<()> {
    let device = On::<T>::open()?;
    let CodecArgs { kv_heads, tokens, head_dim, group_size, .. } = *args;
    let sinks = Sinks::open(args.common.json.as_deref(), None)?;
    let what =
        format!("f32 of {kv_heads} heads, {tokens} tokens, {head_dim} channels on {}", T::NAME);
    let copied = sinks.start(&device, &what)?;
    let shape = [kv_heads, tokens, head_dim];
    let points = time_codec(&device, shape, group_size, args.common.samples)?;
    let mut table = Table::new(["side", "bits", "quantize us", "GB/s", "dequantize us", "GB/s"]);
    for point in &points {
        let rate = |t: Timing| format!("{:.2}", point.float_bytes as f64 / t.median / 1e9);
        table.push([
            point.side.to_string(),
            point.n_bits.to_string(),
            us(point.quantize.median),
            rate(point.quantize),
            us(point.dequantize.median),
            rate(point.dequantize),
        ]);
    }
    sinks.finish(&device, copied, &table, None, &points)
}

fn decode<T: Target>(args: &DecodeArgs) -> Result<()> {
    let DecodeArgs { bench: args, samples, batch, recorded } = args;
    let device = On::<T>::open()?;
    let sinks = Sinks::open(args.json.as_deref(), args.plot.as_deref())?;
    let (model, name) = args.load(&device)?;
    let contexts = args.contexts(&model, timed_steps(*samples));
    let what = format!("{name} on {}, median of {samples} decode steps", T::NAME);
    let copied = sinks.start(&device, &what)?;
    let ways = if *recorded { &[false, true][..] } else { &[false] };
    let subjects: Vec<_> = args
        .caches
        .iter()
        .flat_map(|&cache| batch.iter().map(move |&batch| (cache, batch)))
        .flat_map(|(cache, batch)| {
            ways.iter().map(move |&recorded| DecodeSubject { cache, batch, recorded })
        })
        .collect();
    let longest = contexts.last().copied().unwrap_or(0);
    let bar = args.progress(longest * ways.len() * batch.len());
    let set = |done: usize| bar.set_position(done as u64);
    let points = time_decode(&device, &model, &subjects, &contexts, *samples, set)?;
    bar.finish_and_clear();
    let mut table = Table::new([
        "context", "cache", "batch", "ms/step", "10%", "90%", "tokens/s", "ratio", "cache MB",
        "grown",
    ]);
    let name_of = |p: &DecodePoint| match (p.recorded, batch.len() > 1) {
        (true, _) => format!("{} recorded", p.cache),
        (false, false) => p.cache.clone(),
        (false, true) => format!("{} batch {}", p.cache, p.batch),
    };
    for point in &points {
        let first = points.iter().find(|p| name_of(p) == name_of(point)).unwrap_or(point);
        let grown = point.seconds.median - first.seconds.median;
        // Of the first batch of the same cache at the same length.
        let same = |p: &&DecodePoint| p.context == point.context && p.cache == point.cache;
        let ratio = points.iter().find(same).unwrap_or(point).tokens_per_second();
        table.push([
            point.context.to_string(),
            if point.recorded { name_of(point) } else { point.cache.clone() },
            point.batch.to_string(),
            ms(point.seconds.median),
            ms(point.seconds.low),
            ms(point.seconds.high),
            format!("{:.1}", point.tokens_per_second()),
            format!("{:.2}", point.tokens_per_second() / ratio),
            format!("{:.2}", point.bytes_read as f64 / 1e6),
            ms(grown),
        ]);
    }
    let rates = points.iter().map(|p| (name_of(p), p.context, p.tokens_per_second()));
    let title = format!("Decoding {name} on {}", T::NAME);
    let chart = by_context(title, "tokens per second", false, rates);
    sinks.finish(&device, copied, &table, Some(&chart), &points)
}

fn prefill<T: Target>(PrefillArgs { bench: args, samples }: &PrefillArgs) -> Result<()> {
    let device = On::<T>::open()?;
    let sinks = Sinks::open(args.json.as_deref(), args.plot.as_deref())?;
    let (model, name) = args.load(&device)?;
    let contexts = args.contexts(&model, 0);
    let what = format!("{name} on {}, prompts passed {samples} times", T::NAME);
    let copied = sinks.start(&device, &what)?;
    let bar = args.progress(contexts.iter().sum::<usize>() * (samples + 1));
    let set = |done: usize| bar.set_position(done as u64);
    let caches = &args.caches;
    let points = time_prefill(&device, &model, caches, &contexts, *samples, &ALLOCATOR, set)?;
    bar.finish_and_clear();
    let mut table = Table::new(["tokens", "cache", "seconds", "10%", "90%", "tokens/s", "peak MB"]);
    for point in &points {
        table.push([
            point.tokens.to_string(),
            point.cache.clone(),
            format!("{:.2}", point.seconds.median),
            format!("{:.2}", point.seconds.low),
            format!("{:.2}", point.seconds.high),
            format!("{:.1}", point.tokens as f64 / point.seconds.median),
            format!("{:.2}", point.peak_bytes as f64 / 1e6),
        ]);
    }
    let rates =
        points.iter().map(|p| (p.cache.clone(), p.tokens, p.tokens as f64 / p.seconds.median));
    let title = format!("Prompts through {name} on {}", T::NAME);
    let chart = by_context(title, "tokens per second", false, rates);
    sinks.finish(&device, copied, &table, Some(&chart), &points)
}

impl LayerArgs {
    /// A plan for one token at a time, and for one cache of each kind.
    fn plan(&self) -> AttentionPlan {
        AttentionPlan {
            batch: self.batch,
            n_heads: self.heads,
            n_kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            tokens: 1,
            working_set: 0,
            samples: self.common.samples,
            recorded: false,
        }
    }

    fn describe(&self) -> String {
        let Self { batch, heads, kv_heads, head_dim, .. } = self;
        format!("batch {batch}, {heads} query heads on {kv_heads} of {head_dim}")
    }
}

impl ModelBench {
    /// The model and its name. No text is passed, so a model without a tokenizer will do.
    fn load(&self, device: &Device) -> Result<(LanguageModel, String)> {
        source::load_model(&self.on, device)
    }

    /// The contexts, each followed by `steps` timed steps.
    fn contexts(&self, model: &LanguageModel, steps: usize) -> Vec<usize> {
        if let Some(contexts) = &self.contexts {
            return contexts.clone();
        }
        let limit = model.max_positions();
        let mut contexts: Vec<usize> = Vec::new();
        for context in
            [512, 2048, 8000].map(|context: usize| context.min(limit.saturating_sub(steps)))
        {
            if contexts.last().is_none_or(|&last| context >= last + steps.max(1)) {
                contexts.push(context);
            }
        }
        if limit < 8000 + steps {
            note(format_args!("the model has {limit} positions; contexts are {contexts:?}"));
        }
        contexts
    }

    /// A bar for `tokens` tokens with each cache.
    fn progress(&self, tokens: usize) -> ProgressBar {
        ProgressBar::new((tokens * self.caches.len()) as u64)
    }
}

/// A line per cache over the context length.
fn by_context(
    title: String,
    y_label: &str,
    log_y: bool,
    points: impl Iterator<Item = (String, usize, f64)>,
) -> Chart {
    let mut series: Vec<Series> = Vec::new();
    for (name, context, y) in points {
        let point = (context as f64, y);
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => series.push(Series::new(name, vec![point], Style::LinePoints)),
        }
    }
    let (x_label, y_label) = ("tokens in the cache".to_string(), y_label.to_string());
    Chart { title, x_label, y_label, log_x: true, log_y, series, ..Chart::default() }
}

fn us(seconds: f64) -> String {
    format!("{:.1}", seconds * 1e6)
}

fn ms(seconds: f64) -> String {
    format!("{:.2}", seconds * 1e3)
}
