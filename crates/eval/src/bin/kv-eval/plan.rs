//! `kv-eval plan`: the memory use of a model that is not loaded.

use std::{path::Path, str::FromStr};

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use kv_cli::{
    Backend, MemorySize, ModelSource, NamedFiles, Plain, cache_help, dispatch, exit_on_interrupt,
    head_format, memory_limit, name_of,
};
use kv_cubecl::{On, Target};
use kv_eval::planner::{MemoryPlan, Preset, Request, Subject, plan};
use kv_models::{
    LoadOptions, WeightDtype, decimal_size,
    kv_weights::{Activations, GroupSize, WeightFormat, check_device},
    outline,
};

use crate::json::{JsonArgs, show};

/// Default context, unless the model has fewer positions.
const CONTEXT: usize = 4096;

/// --model is a folder, a .gguf file, a config.json without weights, or a name such as
/// SmolLM2-135M, Llama-3.1-8B or DeepSeek-V4-Pro.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  kv-eval plan --model Llama-3.1-8B --context 32768 --memory 16G
  kv-eval plan --model Phi-4-mini --weights int4 --memory 8G --cache k4v4 --cache k2v2
  kv-eval plan --model SmolLM2-135M.gguf --batch 8
  kv-eval plan --model GameRFT --frames 60 --memory 24G")]
pub(crate) struct Args {
    #[command(flatten)]
    source: ModelSource,
    /// Backend to plan for.
    #[arg(long, value_enum, default_value = "flex")]
    backend: Backend,
    /// Float type: f32, f16, bf16, or auto for the type of the file.
    #[arg(long, default_value = "f32")]
    dtype: WeightDtype,
    /// Weights to plan for: packed, as in the file; restored; or a format to quantize them to, such
    /// as int4, int8, mxfp4 or q4_0. Default: packed; int8 or int4 for a model without a local file
    /// that does not fit.
    #[arg(long, value_name = "WEIGHTS")]
    weights: Option<PlannedWeights>,
    /// Plan for a head quantized to int4, int8 or mxfp4 as it is loaded.
    #[arg(long, value_name = "FORMAT", value_parser = head_format)]
    head: Option<WeightFormat>,
    /// Memory limit, such as 16G or 512MiB [default: the device's memory, or the free memory].
    #[arg(long, value_name = "SIZE")]
    memory: Option<MemorySize>,
    /// Tokens of each sequence [default: 4096, or the model's limit if that is lower].
    #[arg(long, short, conflicts_with = "frames")]
    context: Option<usize>,
    /// Frames of each sequence, for a model of frames.
    #[arg(long)]
    frames: Option<usize>,
    /// Sequences.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    #[arg(long = "cache", help = cache_help(
        "A cache to plan for, repeatable [default: all formats, and the cache of the model's \
         kv_cache.json, if it has one]"
    ))]
    caches: Vec<String>,
    #[command(flatten)]
    json: JsonArgs,
}

/// The weights that a plan assumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlannedWeights {
    Packed,
    Restored,
    /// Quantized to a format.
    As(WeightFormat),
}

impl FromStr for PlannedWeights {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            // The precision of activations does not change the size of weights.
            "packed" | "packed-exact" | "packed-int8" => Ok(Self::Packed),
            "restored" => Ok(Self::Restored),
            "int4" => Ok(Self::As(WeightFormat::Int4(GroupSize::G32))),
            "int8" => Ok(Self::As(WeightFormat::Int8(GroupSize::G32))),
            _ => WeightFormat::from_str(text).map(Self::As).map_err(|_| {
                let names = WeightFormat::ALL.iter().map(|format| format.name());
                let names: Vec<_> = names.collect();
                format!("must be packed, restored, int4, int8, {}", names.join(", "))
            }),
        }
    }
}

/// Weights to plan for if the authors' weights do not fit, in ascending order of loss.
const SMALLER: [PlannedWeights; 2] = [
    PlannedWeights::As(WeightFormat::Int8(GroupSize::G32)),
    PlannedWeights::As(WeightFormat::Int4(GroupSize::G32)),
];

pub(crate) fn run(args: &Args) -> Result<()> {
    let files = NamedFiles::default().reads_model("model", args.source.given());
    let files = args.caches.iter().fold(files, |files, cache| files.reads("cache", cache));
    files.writes("json", args.json.path()).check()?;
    exit_on_interrupt()?;
    dispatch!(args.backend, Plain, run_on(args))
}

fn run_on<T: Target>(args: &Args) -> Result<()> {
    let device = On::<T>::open()?;
    let (screen, json) = args.json.open()?;
    if let Some(revision) = args.source.revision() {
        bail!("revision {revision}: only models of the hub have one; a plan downloads nothing");
    }
    let first = match args.weights {
        Some(weights) => weights,
        None if args.packs(&device) => PlannedWeights::Packed,
        None => PlannedWeights::Restored,
    };
    let mut plan = args.plan(first, &device)?;
    let fits = |plan: &MemoryPlan| plan.caches.iter().any(|row| row.fits);
    let is_known_by_name = !Path::new(args.source.given()).exists();
    if args.weights.is_none() && is_known_by_name && plan.weights.is_some() && !fits(&plan) {
        for smaller in SMALLER.into_iter().filter(|_| args.packs(&device)) {
            let mut other = args.plan(smaller, &device)?;
            if let (PlannedWeights::As(format), true) = (smaller, fits(&other)) {
                let size = plan.weights.iter().flat_map(|types| types.values()).sum::<usize>();
                let (size, kind) = (decimal_size(size as u64), plan.weight_types());
                other.notes.push(format!(
                    "with weights of {size} in {kind} no cache fits: this is a plan for weights \
                     quantized to {format}; --weights chooses others"
                ));
                plan = other;
                break;
            }
        }
    }
    show(screen, json, &plan)
}

impl Args {
    /// Returns whether the device multiplies packed weights.
    fn packs(&self, device: &Device) -> bool {
        self.dtype == WeightDtype::F32 && check_device("", device).is_ok()
    }

    /// Plans for weights of a kind.
    fn plan(&self, weights: PlannedWeights, device: &Device) -> Result<MemoryPlan> {
        let (packed, planned) = match weights {
            PlannedWeights::Packed => (Some(Activations::Int16), None),
            PlannedWeights::Restored => (None, None),
            PlannedWeights::As(format) => (Some(Activations::Int16), Some(format)),
        };
        let options = LoadOptions::default().with_dtype(self.dtype).with_packed(packed);
        let options = options.with_planned(planned).with_head(self.head);
        if let (Some(format), false) = (planned, self.dtype == WeightDtype::F32) {
            bail!("weights {format}: are multiplied in f32, not with --dtype {}", self.dtype);
        }
        let model = self.source.given();
        let path = Path::new(model);
        let exists = path.try_exists().with_context(|| format!("model {model}: cannot read"))?;
        let subject = if exists {
            Subject::of_files(&name_of(path), outline(path, device, options)?).on(device)
        } else if let Some(preset) = Preset::find(model) {
            preset.subject(device, options)?
        } else {
            let all = Preset::all();
            let names: Vec<_> = all.iter().map(Preset::name).collect();
            bail!("model {model}: no such file or folder, and not one of {}", names.join(", "));
        };
        let request = Request {
            context: self.context(&subject)?,
            batch: self.batch,
            limit: memory_limit(self.memory, device),
            caches: self.caches.clone(),
        };
        Ok(plan(&subject, &request)?)
    }

    /// Returns the tokens of each sequence.
    fn context(&self, subject: &Subject) -> Result<usize> {
        let most = subject.max_context();
        let Some(frames) = self.frames else {
            let ring = subject.frame.map(|frame| frame.ring * frame.tokens);
            return Ok(self.context.unwrap_or_else(|| ring.unwrap_or(CONTEXT).min(most)));
        };
        let frame = subject.frame;
        let frame = frame.with_context(|| {
            format!("frames {frames}: {} is not a model of frames", subject.name)
        })?;
        frames.checked_mul(frame.tokens).filter(|tokens| (1..=most).contains(tokens)).with_context(
            || {
                let most = most / frame.tokens;
                format!("frames {frames}: must be 1 to {most}, of {} tokens each", frame.tokens)
            },
        )
    }
}
