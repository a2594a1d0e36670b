//! `kv-train bench`: training steps with a quantized cache and with a float one.
//!
//! Times are measured in one process, in turn; peak memory in one process per kind of step.

use std::{path::Path, process::Command, time::Instant};

use anyhow::{Context, Result, bail};
use kv_cli::{Backend, ModelSource, dispatch};
use kv_models::{
    Loaded, ModelCacheConfig,
    kv_cubecl::{Autodiff, On, Target},
};
use kv_train::{Adapter, Objective, QatConfig, TrainConfig, Trainable, bench::Stepper};

use crate::{
    args::trainable,
    memory::{self, Sizes},
    spec::{Weights, load},
};

/// Arguments of `kv-train bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelSource,
    /// Cache of the quantized steps.
    #[arg(long, value_parser = ModelCacheConfig::find, default_value = "k2v2")]
    cache: ModelCacheConfig,
    /// Backend to train on.
    #[arg(long, value_enum, default_value = "flex")]
    backend: Backend,
    /// Tokens per sequence.
    #[arg(long, default_value_t = 1024)]
    seq_len: usize,
    /// Sequences per step.
    #[arg(long, default_value_t = 2)]
    batch: usize,
    /// Timed steps of each kind, after one untimed step.
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Weights to train.
    #[arg(long, value_parser = trainable(), default_value = "all")]
    trainable: Trainable,
    /// Train low-rank adapters of this rank instead of the weights.
    #[arg(long)]
    lora: Option<usize>,
    /// Load quantized weights restored or packed; packed weights need --lora.
    #[arg(long, value_enum, default_value = "restored")]
    weights: Weights,
    /// Recompute cheap activations in the backward pass instead of keeping them.
    #[arg(long)]
    gradient_checkpointing: bool,
    /// Make two steps of one kind and print the peak resident memory in kB.
    #[arg(long, hide = true)]
    memory_of: Option<usize>,
}

/// The kinds of step: name, whether the cache is quantized, and objective.
const KINDS: [(&str, bool, Objective); 3] = [
    ("float cache, cross-entropy", false, Objective::CrossEntropy),
    ("quantized cache, cross-entropy", true, Objective::CrossEntropy),
    ("quantized cache, distillation", true, Objective::Distillation),
];

impl Args {
    fn config(&self, kind: usize) -> TrainConfig {
        let (_, quantized, objective) = KINDS[kind];
        TrainConfig {
            qat: quantized.then(|| QatConfig::new(&self.cache)),
            objective,
            trainable: self.trainable,
            adapter: self.lora.map(|rank| Adapter { rank, alpha: 2.0 * rank as f64 }),
            gradient_checkpointing: self.gradient_checkpointing,
            seq_len: self.seq_len,
            batch: self.batch,
            ..TrainConfig::default()
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    for kind in 0..KINDS.len() {
        args.config(kind).validate()?;
    }
    let model = args.model.find()?;
    match args.memory_of {
        Some(kind) => dispatch!(args.backend, Autodiff, memory(args, &model, kind)),
        None => dispatch!(args.backend, Autodiff, times(args, &model)),
    }
}

fn stepper<T: Target>(args: &Args, model: &Path, kind: usize) -> Result<Stepper> {
    let device = On::<T>::open()?;
    let sizes = Sizes::of_model(model, args.weights, &device)?;
    memory::check(&sizes, &args.config(kind), (args.backend, &*device), None)?;
    let Loaded { model, notes, .. } = load(model, &device, args.weights)?;
    kv_cli::notes(&notes);
    Ok(Stepper::new(&device, model, &args.config(kind))?)
}

fn times<T: Target>(args: &Args, model: &Path) -> Result<()> {
    let peaks: Vec<u64> = (0..KINDS.len()).map(peak).collect::<Result<_>>()?;
    let mut steppers: Vec<Stepper> =
        (0..KINDS.len()).map(|kind| stepper::<T>(args, model, kind)).collect::<Result<_>>()?;
    let mut seconds = vec![Vec::new(); KINDS.len()];
    for round in 0..=args.steps {
        for (stepper, seconds) in steppers.iter_mut().zip(&mut seconds) {
            let start = Instant::now();
            stepper.step()?;
            if round > 0 {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
    }
    let median = |seconds: &mut Vec<f64>| kv_eval::bench::median(seconds);
    let medians: Vec<f64> = seconds.iter_mut().map(median).collect();
    println!(
        "{}{} on {}, {} x {} tokens, {}, {}{} trained, median of {} alternating steps",
        args.model.name(),
        if args.weights == Weights::Packed { ", packed," } else { "" },
        T::NAME,
        args.batch,
        args.seq_len,
        args.cache,
        args.lora.map_or(String::new(), |rank| format!("adapters of rank {rank} on ")),
        args.trainable,
        args.steps
    );
    println!(
        "{:<32} {:>9} {:>9} {:>10} {:>9}",
        "step", "seconds", "of float", "peak MB", "of float"
    );
    for (kind, (name, ..)) in KINDS.iter().enumerate() {
        println!(
            "{name:<32} {:>9.2} {:>9.3} {:>10.0} {:>9.3}",
            medians[kind],
            medians[kind] / medians[0],
            peaks[kind] as f64 / 1e3,
            peaks[kind] as f64 / peaks[0] as f64,
        );
    }
    Ok(())
}

/// Measures the peak resident memory in kB of a new process that makes two steps.
fn peak(kind: usize) -> Result<u64> {
    let program = std::env::current_exe().context("this program's own path")?;
    let out = Command::new(program)
        .args(std::env::args_os().skip(1))
        .arg(format!("--memory-of={kind}"))
        .output()
        .context("cannot start this program again")?;
    let text = String::from_utf8_lossy(&out.stdout);
    match text.trim().parse() {
        Ok(peak) if out.status.success() => Ok(peak),
        _ => {
            let said = String::from_utf8_lossy(&out.stderr);
            bail!("{}", said.trim().trim_start_matches("error: "))
        }
    }
}

fn memory<T: Target>(args: &Args, model: &Path, kind: usize) -> Result<()> {
    if kind >= KINDS.len() {
        bail!("memory-of {kind}: must be below {}", KINDS.len());
    }
    let mut stepper = stepper::<T>(args, model, kind)?;
    for _ in 0..2 {
        stepper.step()?;
    }
    let status = std::fs::read_to_string("/proc/self/status")
        .context("cannot read peak memory from /proc/self/status")?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak.and_then(|line| line.split_whitespace().next());
    println!("{}", peak.context("/proc/self/status has no VmHWM")?);
    Ok(())
}
