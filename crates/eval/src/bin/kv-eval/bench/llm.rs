//! `kv-eval bench llm`: prompts and generated tokens by depth.

use std::path::PathBuf;

use anyhow::Result;
use indicatif::ProgressBar;
use kv_cli::{
    MemoryRequest, ModelArgs, NamedFiles, SpeculateArgs,
    source::{self, Subject},
};
use kv_cubecl::{On, Target};
use kv_eval::bench::{LlmPlan, Spread, time_llm};
use kv_models::Speculate;
use kv_report::Table;

use super::output::Sinks;
use crate::{
    arguments::{NamedCache, configs, policies},
    common::{StepArgs, note_policies, read_ids},
    json::JsonArgs,
    profile::Profile,
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kv-eval bench llm --model SmolLM2-135M.gguf --prompt 512 --generate 128 --depths 0,4096")]
pub(crate) struct LlmArgs {
    #[command(flatten)]
    pub(super) on: ModelArgs,
    /// Cache or policy to time; repeatable.
    #[arg(long = "cache", default_values = ["float", "k4v4"])]
    caches: Vec<NamedCache>,
    /// Tokens of a prompt.
    #[arg(long, default_value_t = 512)]
    prompt: usize,
    /// Number of generated tokens, at least 50.
    #[arg(long, default_value_t = 128)]
    generate: usize,
    /// Numbers of tokens in the cache before, ascending.
    #[arg(long, value_delimiter = ',', default_value = "0,512")]
    depths: Vec<usize>,
    /// Repetitions, after one to warm up.
    #[arg(long, default_value_t = 5)]
    repetitions: usize,
    /// Fill caches with this text, or - for standard input, and generate its next tokens, whatever
    /// the model would pick [default: filler, and what the model picks].
    #[arg(long, short = 'f')]
    text: Option<PathBuf>,
    #[command(flatten)]
    steps: StepArgs,
    #[command(flatten)]
    speculate: SpeculateArgs,
    #[command(flatten)]
    json: JsonArgs,
}

impl LlmArgs {
    fn capacity(&self) -> usize {
        let deepest = self.depths.iter().copied().max().unwrap_or(0);
        deepest.saturating_add(self.prompt.max(self.generate))
    }

    fn request(&self) -> MemoryRequest {
        let capacity = self.capacity();
        let caches = configs(&self.caches);
        let held = caches.iter().map(|cache| (cache.clone(), 1)).collect();
        MemoryRequest { held, copies: true, ..MemoryRequest::new(caches, capacity) }
    }

    pub(super) fn files(&self) -> NamedFiles<'_> {
        policies(NamedFiles::default(), &self.caches)
            .reads_model("model", self.on.source.given())
            .reads_models("draft-model", self.speculate.draft_model())
            .reads_optional("text", self.text.as_ref())
            .writes("json", self.json.path())
    }
}

pub(super) fn llm<T: Target>(args: &LlmArgs, profile: &mut Profile) -> Result<()> {
    let device = On::<T>::open()?;
    profile.device(&device)?;
    let mut sinks = Sinks::open(&args.json, None)?;
    let (Subject { model, tokenizer, name }, budget) =
        source::load_model(&args.on, args.request(), &device)?;
    let capacity = args.capacity();
    let (mut text, mut speculate) = (vec![], Speculate::Never);
    if args.text.is_some() || args.speculate.is_given() {
        let tokenizer = tokenizer?;
        let both = (&model, &tokenizer);
        speculate =
            args.speculate.load(speculate, &args.on, both, &budget, args.request(), &device)?;
        if let Some(path) = &args.text {
            (text, _) = read_ids(path, &tokenizer, Some(capacity + 1))?;
        }
    }
    sinks.budget = Some(budget);
    let caches = configs(&args.caches);
    note_policies(&caches, model.spec());
    profile.model(&model, &name);
    let LlmArgs { prompt, generate, repetitions, .. } = *args;
    let graph_capture = args.steps.graph_capture();
    let depths = args.depths.clone();
    let plan = LlmPlan { prompt, generate, depths, repetitions, graph_capture, text, speculate };
    let copied = sinks.start(&device, &format!("{name} on {}, {repetitions} times", T::NAME))?;
    let bar = ProgressBar::new(plan.tokens().saturating_mul(caches.len()) as u64);
    let set = |done: usize| bar.set_position(done as u64);
    let points = time_llm(&device, &model, &caches, &plan, set)?;
    bar.finish_and_clear();
    let mut table = Table::new([
        "test", "depth", "cache", "tokens/s", "+-", "forward", "+-", "first ms", "+-", "longest",
        "at", "guessed",
    ]);
    let cells = |spread: Spread, scale: f64| {
        [spread.mean, spread.deviation].map(|x| format!("{:.1}", x * scale))
    };
    for point in &points {
        let [rate, rate_spread] = cells(point.tokens_per_second, 1.0);
        let [forward, forward_spread] = cells(point.forward_tokens_per_second, 1.0);
        let first = point.first_token_seconds.map(|seconds| cells(seconds, 1e3));
        let [first, first_spread] = first.unwrap_or_default();
        let longest = point.longest_step;
        let [longest, at] = longest
            .map(|step| [format!("{:.2}x", step.over_median), step.tokens.to_string()])
            .unwrap_or_default();
        let guessed = point.guesses.map(|it| format!("{} of {}", it.right, it.verified));
        let (test, depth, cache) = (&point.test, point.depth, &point.cache);
        table.push([
            test.clone(),
            depth.to_string(),
            cache.clone(),
            rate,
            rate_spread,
            forward,
            forward_spread,
            first,
            first_spread,
            longest,
            at,
            guessed.unwrap_or_default(),
        ]);
    }
    sinks.finish(&device, copied, &table, None, &points)
}
