//! `kv-eval bench`: the speed of caches.

mod frames;
mod llm;
mod models;
mod output;
mod sparse;

use std::path::PathBuf;

use anyhow::{Context, Result};
use indicatif::ProgressBar;
use kv_cli::{NamedFiles, Plain, cache_help, dispatch};
use kv_cubecl::{On, Target};
use kv_eval::bench::{
    AttentionPlan, Timing, codec_bytes, time_append, time_codec, time_decode_attention,
};
use kv_report::Table;

use self::{
    frames::{FramesArgs, frames},
    llm::{LlmArgs, llm},
    models::{DecodeArgs, PrefillArgs, decode, prefill},
    output::{Common, Sinks, by_context, check_memory, us},
    sparse::{SparseArgs, sparse},
};
use crate::{
    arguments::{NamedCache, layer_caches, policies},
    profile::{Profile, ProfileArgs},
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kv-eval bench decode-attention
  kv-eval bench llm --model SmolLM2-135M.gguf
  kv-eval bench --profile where.html decode --model models/austen")]
pub(crate) struct Args {
    #[command(subcommand)]
    bench: Bench,
    #[command(flatten)]
    profile: ProfileArgs,
}

#[derive(Debug, clap::Subcommand)]
enum Bench {
    /// Time one layer's attention by context length: bytes read per second, compared with copying
    /// memory.
    DecodeAttention(AttentionArgs),
    /// Time decode steps of a whole model by context length.
    Decode(DecodeArgs),
    /// Time prefill of a whole model into an empty cache.
    Prefill(PrefillArgs),
    /// Time prefill and decode by depth, as in llama.cpp's llama-bench.
    ///
    /// "longest" is the longest decode step over the median one, each step by its fastest
    /// repetition, and "at" the tokens in the cache before it.
    Llm(LlmArgs),
    /// Time appending a token, and steps that flush keys from the residual.
    #[command(after_help = "Examples:
  kv-eval bench flush --cache k4v4 --cache k2v2-gflush --contexts 4096")]
    Flush(LayerArgs),
    /// Time a frame's attention over a full ring of frames, as in a world model.
    Frames(FramesArgs),
    /// Time a step of one layer of sparse attention, as in DeepSeek-V4, against attention to all
    /// entries, and its indexer against copying its keys.
    Sparse(SparseArgs),
    /// Time quantizing and restoring whole tensors.
    Quantize(CodecArgs),
}

/// The shape and the caches of one layer, and the context lengths.
#[derive(Debug, clap::Args)]
pub(crate) struct LayerArgs {
    #[command(flatten)]
    common: Common,
    #[arg(long = "cache", help = cache_help(
        "A cache to time, repeatable; all others are compared with the first. A policy stands for \
         every cache that it gives a layer"
    ), default_values = [
        "float", "float-f16", "k8v8", "k4v4", "k3v3", "k2v2", "kint8vint8", "kint8gvint8g",
        "ke4m3ve4m3", "ke5m2ve5m2",
        "ke4m3bve4m3b", "ke2m1bve2m1b", "kmxfp4vmxfp4",
    ])]
    caches: Vec<NamedCache>,
    /// Context lengths to time at.
    #[arg(long, value_delimiter = ',', default_value = "1024,2048,4096,8192,16384,32768")]
    contexts: Vec<usize>,
    /// Number of sequences.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Query heads. The default shape is that of SmolLM2-135M.
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
#[command(after_help = "Examples:
  kv-eval bench decode-attention
  kv-eval bench decode-attention --cache k4v4 --contexts 4096,8192 --plot attention.svg")]
pub(crate) struct AttentionArgs {
    #[command(flatten)]
    layer: LayerArgs,
    /// Number of tokens appended and attending at once.
    #[arg(long, default_value_t = 1)]
    tokens: usize,
    /// Minimum megabytes of cache that one sample reads, to exceed the processor's caches.
    #[arg(long, default_value_t = 128)]
    working_set: usize,
    /// Capture the launches once and replay them (CUDA, WGPU).
    #[arg(long, alias = "recorded")]
    graph_capture: bool,
    /// Write a chart of microseconds by context length to this SVG file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kv-eval bench quantize
  kv-eval bench quantize --tokens 32768 --group-size 64")]
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

impl Bench {
    fn files(&self) -> NamedFiles<'_> {
        let (files, json) = match self {
            Self::DecodeAttention(args) => {
                let files = policies(NamedFiles::default(), &args.layer.caches);
                (files.writes("plot", args.plot.as_deref()), &args.layer.common.json)
            }
            Self::Flush(args) => (policies(NamedFiles::default(), &args.caches), &args.common.json),
            Self::Frames(args) => {
                (policies(NamedFiles::default(), &args.caches), &args.common.json)
            }
            Self::Sparse(args) => (NamedFiles::default(), &args.common.json),
            Self::Quantize(args) => (NamedFiles::default(), &args.common.json),
            Self::Decode(args) => return args.bench.files(),
            Self::Prefill(args) => return args.bench.files(),
            Self::Llm(args) => return args.files(),
        };
        files.writes("json", json.path())
    }
}

pub(crate) fn run(Args { bench, profile }: &Args) -> Result<()> {
    bench.files().writes("profile", profile.path()).check()?;
    profile.end_on_interrupt()?;
    let mut profile = profile.start()?;
    let to = &mut profile;
    match bench {
        Bench::DecodeAttention(args) => {
            dispatch!(args.layer.common.backend, Plain, attention(args, to))
        }
        Bench::Flush(args) => dispatch!(args.common.backend, Plain, flush(args, to)),
        Bench::Frames(args) => dispatch!(args.common.backend, Plain, frames(args, to)),
        Bench::Sparse(args) => dispatch!(args.common.backend, Plain, sparse(args, to)),
        Bench::Quantize(args) => dispatch!(args.common.backend, Plain, codec(args, to)),
        Bench::Decode(args) => dispatch!(args.bench.on.backend, Plain, decode(args, to)),
        Bench::Prefill(args) => dispatch!(args.bench.on.backend, Plain, prefill(args, to)),
        Bench::Llm(args) => dispatch!(args.on.backend, Plain, llm(args, to)),
    }?;
    profile.finish()
}

fn attention<T: Target>(args: &AttentionArgs, profile: &mut Profile) -> Result<()> {
    let device = On::<T>::open()?;
    profile.device(&device)?;
    let &AttentionArgs { ref layer, tokens, graph_capture, .. } = args;
    let working_set = args.working_set.checked_mul(1 << 20).with_context(|| {
        format!("working-set {}: must be at most {} megabytes", args.working_set, usize::MAX >> 20)
    })?;
    let plan = AttentionPlan { tokens, working_set, graph_capture, ..layer.plan() };
    let caches = layer_caches(&layer.caches);
    for &context in &layer.contexts {
        check_memory(plan.attention_bytes::<T>(&caches, context)?, &device)?;
    }
    let how = if graph_capture { "replayed" } else { "launched" };
    let shape = format!("{}, {tokens} at once, {how}", layer.describe());
    let sinks = Sinks::open(&layer.common.json, args.plot.as_deref())?;
    let what = format!("decode attention of one layer on {}: {shape}", T::NAME);
    let copied = sinks.start(&device, &what)?;
    let mut table = Table::new([
        "context", "cache", "us", "10%", "90%", "KB read", "GB/s", "of copy", "speedup",
    ]);
    let mut points = Vec::new();
    let bar = ProgressBar::new(layer.contexts.len() as u64);
    for &context in &layer.contexts {
        let at = time_decode_attention(&device, &plan, &caches, context)?;
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

fn flush<T: Target>(args: &LayerArgs, profile: &mut Profile) -> Result<()> {
    let device = On::<T>::open()?;
    profile.device(&device)?;
    let (plan, caches) = (args.plan(), layer_caches(&args.caches));
    for &context in &args.contexts {
        for config in &caches {
            check_memory(plan.append_bytes(config, context)?, &device)?;
        }
    }
    let sinks = Sinks::open(&args.common.json, None)?;
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
        for config in &caches {
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

fn codec<T: Target>(args: &CodecArgs, profile: &mut Profile) -> Result<()> {
    let device = On::<T>::open()?;
    profile.device(&device)?;
    let CodecArgs { kv_heads, tokens, head_dim, group_size, .. } = *args;
    check_memory(codec_bytes([kv_heads, tokens, head_dim])?, &device)?;
    let sinks = Sinks::open(&args.common.json, None)?;
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

impl LayerArgs {
    /// Returns a plan for one token at a time, with one cache per sample.
    fn plan(&self) -> AttentionPlan {
        AttentionPlan {
            batch: self.batch,
            n_heads: self.heads,
            n_kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            tokens: 1,
            working_set: 0,
            samples: self.common.samples,
            graph_capture: false,
        }
    }

    fn describe(&self) -> String {
        let Self { batch, heads, kv_heads, head_dim, .. } = self;
        format!("batch {batch}, {heads} query heads on {kv_heads} of {head_dim}")
    }
}
