//! `kv-eval bench decode` and `bench prefill`: whole models.

use std::path::PathBuf;

use anyhow::Result;
use burn::tensor::Device;
use indicatif::ProgressBar;
use kv_cli::{
    MemoryBudget, MemoryRequest, ModelArgs, NamedFiles, note,
    source::{self, Subject},
};
use kv_cubecl::{On, Target};
use kv_eval::bench::{DecodePoint, DecodeSubject, time_decode, time_prefill, timed_steps};
use kv_models::LanguageModel;
use kv_report::Table;

use super::output::{Sinks, by_context};
use crate::{
    ALLOCATOR,
    arguments::{NamedCache, configs, policies},
    common::note_policies,
    json::JsonArgs,
    profile::Profile,
};

const LONGEST: usize = 8000;

#[derive(Debug, clap::Args)]
pub(crate) struct ModelBench {
    #[command(flatten)]
    pub(super) on: ModelArgs,
    /// Cache or policy to time; repeatable.
    #[arg(long = "cache", default_values = [
        "float", "float-f16", "k4v4", "k2v2",
    ])]
    caches: Vec<NamedCache>,
    /// Context lengths to time at, ascending [default: 512, 2048 and 8000, within the model's
    /// limit].
    #[arg(long, value_delimiter = ',')]
    contexts: Option<Vec<usize>>,
    #[command(flatten)]
    json: JsonArgs,
    /// Write a chart of tokens per second by context length to this SVG file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kv-eval bench decode --model SmolLM2-135M.gguf --cache float --cache k4v4 --contexts 512,8000
  kv-eval bench decode --model models/austen --batch 1,8 --plot decode.svg")]
pub(crate) struct DecodeArgs {
    #[command(flatten)]
    pub(super) bench: ModelBench,
    /// Decode steps per cache and context length; the median is reported.
    #[arg(long, default_value_t = 15)]
    samples: usize,
    /// Number of sequences per step, whose lengths differ by one token each. Several numbers are
    /// compared.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    batch: Vec<usize>,
    /// Also time steps that are captured once and replayed (CUDA, WGPU).
    #[arg(long, alias = "recorded")]
    graph_capture: bool,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kv-eval bench prefill --model SmolLM2-135M.gguf --contexts 512,2048")]
pub(crate) struct PrefillArgs {
    #[command(flatten)]
    pub(super) bench: ModelBench,
    /// Repetitions per prompt, after one that measures memory; the median is reported.
    #[arg(long, default_value_t = 3)]
    samples: usize,
}

pub(super) fn decode<T: Target>(args: &DecodeArgs, profile: &mut Profile) -> Result<()> {
    let DecodeArgs { bench: args, samples, batch, graph_capture } = args;
    let device = On::<T>::open()?;
    profile.device(&device)?;
    let mut sinks = Sinks::open(&args.json, args.plot.as_deref())?;
    let ways = if *graph_capture { &[false, true][..] } else { &[false] };
    let caches = configs(&args.caches);
    let subjects: Vec<_> = caches
        .iter()
        .flat_map(|cache| batch.iter().map(move |&batch| (cache, batch)))
        .flat_map(|(cache, batch)| {
            ways.iter().map(move |&graph_capture| DecodeSubject {
                cache: cache.clone(),
                batch,
                graph_capture,
            })
        })
        .collect();
    let request = MemoryRequest {
        held: subjects.iter().flat_map(DecodeSubject::caches).collect(),
        batch: batch.iter().copied().max().unwrap_or(1),
        ..args.request(timed_steps(*samples))
    };
    let (model, name, budget) = args.load(request, &device)?;
    sinks.budget = Some(budget);
    profile.model(&model, &name);
    let contexts = args.contexts(&model, timed_steps(*samples));
    let what = format!("{name} on {}, median of {samples} decode steps", T::NAME);
    let copied = sinks.start(&device, &what)?;
    let longest = contexts.last().copied().unwrap_or(0);
    let bar = args.progress(longest.saturating_mul(ways.len() * batch.len()));
    let set = |done: usize| bar.set_position(done as u64);
    let points = time_decode(&device, &model, &subjects, &contexts, *samples, set)?;
    bar.finish_and_clear();
    let several = batch.len() > 1;
    let rates = points.iter().map(|p| (name_of(p, several), p.context, p.tokens_per_second()));
    let title = format!("Decoding {name} on {}", T::NAME);
    let chart = by_context(title, "tokens per second", false, rates);
    let table = decode_table(&points, several);
    sinks.finish(&device, copied, &table, Some(&chart), &points)
}

/// Returns the name of a line of the chart; `several` if there are several batch sizes.
fn name_of(point: &DecodePoint, several: bool) -> String {
    let DecodePoint { cache, batch, .. } = point;
    match (point.graph_capture, several) {
        (true, _) => format!("{cache} replayed"),
        (false, false) => cache.clone(),
        (false, true) => format!("{cache} batch {batch}"),
    }
}

fn decode_table(points: &[DecodePoint], several: bool) -> Table {
    let mut table = Table::new([
        "context", "cache", "batch", "ms/step", "10%", "90%", "tokens/s", "ratio", "cache MB",
        "grown",
    ]);
    for point in points {
        let first =
            points.iter().find(|p| name_of(p, several) == name_of(point, several)).unwrap_or(point);
        let grown = point.seconds.median - first.seconds.median;
        // The rate of the first batch size of the same cache at the same length.
        let same = |p: &&DecodePoint| p.context == point.context && p.cache == point.cache;
        let ratio = points.iter().find(same).unwrap_or(point).tokens_per_second();
        table.push([
            point.context.to_string(),
            if point.graph_capture { name_of(point, several) } else { point.cache.clone() },
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
    table
}

pub(super) fn prefill<T: Target>(
    PrefillArgs { bench: args, samples }: &PrefillArgs,
    profile: &mut Profile,
) -> Result<()> {
    let device = On::<T>::open()?;
    profile.device(&device)?;
    let mut sinks = Sinks::open(&args.json, args.plot.as_deref())?;
    let (model, name, budget) = args.load(args.request(0), &device)?;
    sinks.budget = Some(budget);
    profile.model(&model, &name);
    let contexts = args.contexts(&model, 0);
    let what = format!("{name} on {}, prompts passed {samples} times", T::NAME);
    let copied = sinks.start(&device, &what)?;
    let all = contexts.iter().copied().fold(0, usize::saturating_add);
    let bar = args.progress(all.saturating_mul(samples.saturating_add(1)));
    let set = |done: usize| bar.set_position(done as u64);
    let caches = configs(&args.caches);
    let points = time_prefill(&device, &model, &caches, &contexts, *samples, &ALLOCATOR, set)?;
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

impl ModelBench {
    pub(super) fn files(&self) -> NamedFiles<'_> {
        policies(NamedFiles::default(), &self.caches)
            .reads_model("model", self.on.source.given())
            .writes("json", self.json.path())
            .writes("plot", self.plot.as_deref())
    }

    /// Requests memory for the longest context and `steps` more tokens.
    fn request(&self, steps: usize) -> MemoryRequest {
        let longest = self.contexts.iter().flatten().copied().max().unwrap_or(LONGEST);
        MemoryRequest::new(configs(&self.caches), longest.saturating_add(steps))
    }

    /// Loads the model and returns it with its name and the memory budget. The model may have no
    /// tokenizer.
    fn load(
        &self,
        request: MemoryRequest,
        device: &Device,
    ) -> Result<(LanguageModel, String, MemoryBudget)> {
        let (Subject { model, name, .. }, budget) = source::load_model(&self.on, request, device)?;
        note_policies(&configs(&self.caches), model.spec());
        Ok((model, name, budget))
    }

    /// Returns the contexts, which leave room for `steps` timed steps.
    fn contexts(&self, model: &LanguageModel, steps: usize) -> Vec<usize> {
        if let Some(contexts) = &self.contexts {
            return contexts.clone();
        }
        let limit = model.max_positions();
        let mut contexts: Vec<usize> = Vec::new();
        for context in
            [512, 2048, LONGEST].map(|context: usize| context.min(limit.saturating_sub(steps)))
        {
            if contexts.last().is_none_or(|&last| context >= last.saturating_add(steps.max(1))) {
                contexts.push(context);
            }
        }
        if limit < LONGEST.saturating_add(steps) {
            note(format_args!("the model has {limit} positions; contexts are {contexts:?}"));
        }
        contexts
    }

    fn progress(&self, tokens: usize) -> ProgressBar {
        ProgressBar::new(tokens.saturating_mul(self.caches.len()) as u64)
    }
}

fn ms(seconds: f64) -> String {
    format!("{:.2}", seconds * 1e3)
}
