//! `kv-train world`.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use kv_cli::{Backend, MemorySize, Plain, Screen, dispatch};
use kv_models::{
    WeightDtype,
    kv_cubecl::{Autodiff, Frames, On, Target},
};
use kv_report::chart::{Chart, Series, Style};
use kv_train::{
    Resume, Schedule, TrainConfig, WorldConfig, WorldHistory, WorldRun, checkpointed_world,
    train_world, world_config,
};
use serde::{Deserialize, Serialize};

use crate::{
    memory::{self, Sizes},
    run::{Again, Ended, new_folder, unless_stopped},
    stop::Stop,
};

/// Steps of training between two lines that are printed.
const TELL_EVERY: usize = 10;

/// Arguments of `kv-train world`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The run's folder, which must not hold another run.
    #[arg(long)]
    out: PathBuf,
    /// Folder of a model of the same shape and maze, to start from instead of random weights.
    #[arg(long)]
    from: Option<PathBuf>,
    /// Where to train.
    #[arg(long, value_enum, default_value = "flex")]
    backend: Backend,
    /// Seed of the maze.
    #[arg(long, default_value_t = WorldConfig::default().maze)]
    maze: u64,
    /// Pixels along a side of the patch of a frame that is a token.
    #[arg(long, default_value_t = WorldConfig::default().patch)]
    patch: usize,
    /// Channels that a patch is reduced to.
    #[arg(long, default_value_t = WorldConfig::default().channels)]
    channels: usize,
    /// Width of the residual stream.
    #[arg(long, default_value_t = WorldConfig::default().d_model)]
    hidden: usize,
    /// Layers.
    #[arg(long, default_value_t = WorldConfig::default().layers)]
    layers: usize,
    /// Heads.
    #[arg(long, default_value_t = WorldConfig::default().heads)]
    heads: usize,
    /// Every so many layers sees all frames of a sequence, the others the newest few.
    #[arg(long, default_value_t = WorldConfig::default().local_idx)]
    local_idx: usize,
    /// Frames that local layers see.
    #[arg(long, default_value_t = WorldConfig::default().local_window.0)]
    local_window: u64,
    /// Frames of a sequence.
    #[arg(long, default_value_t = WorldConfig::default().frames)]
    frames: usize,
    /// Sequences of an optimizer step.
    #[arg(long, default_value_t = WorldConfig::default().batch)]
    batch: usize,
    /// Optimizer steps.
    #[arg(long, default_value_t = WorldConfig::default().steps)]
    steps: usize,
    /// The last steps, in which the model learns to finish what it made of noise in one step.
    #[arg(long, default_value_t = WorldConfig::default().two_step)]
    two_step: usize,
    /// Optimizer steps between validations and checkpoints; both come after the last step too.
    #[arg(long, default_value_t = WorldConfig::default().steps_per_epoch)]
    steps_per_epoch: usize,
    /// The highest learning rate.
    #[arg(long, default_value_t = WorldConfig::default().schedule.lr)]
    lr: f64,
    /// The learning rate of the last step.
    #[arg(long, default_value_t = WorldConfig::default().schedule.min_lr)]
    min_lr: f64,
    /// Optimizer steps of warm-up.
    #[arg(long, default_value_t = WorldConfig::default().schedule.warmup)]
    warmup: usize,
    /// Decoupled weight decay of matrices.
    #[arg(long, default_value_t = WorldConfig::default().weight_decay)]
    weight_decay: f32,
    /// Frames that the model plays on by itself in a validation.
    #[arg(long, default_value_t = WorldConfig::default().valid_frames)]
    valid_frames: usize,
    /// Seed of the weights, of the episodes and of noise.
    #[arg(long, default_value_t = WorldConfig::default().seed)]
    seed: u64,
    /// The memory that training may take, such as 16G [default: what is free].
    #[arg(long)]
    memory: Option<MemorySize>,
}

/// What a run is made with, beside its configuration.
struct With<'a> {
    from: Option<PathBuf>,
    memory: Option<MemorySize>,
    stop: &'a Stop,
}

/// What of a run does not decide its result.
#[derive(Debug, Serialize, Deserialize)]
struct Spec {
    backend: Backend,
}

/// Where [`Spec`] is.
const SPEC: &str = "run.json";

/// Starts a run.
pub(crate) fn start(args: &Args, stop: &Stop) -> Result<Ended> {
    let config = WorldConfig {
        maze: args.maze,
        patch: args.patch,
        channels: args.channels,
        d_model: args.hidden,
        layers: args.layers,
        heads: args.heads,
        local_idx: args.local_idx,
        local_window: Frames(args.local_window),
        frames: args.frames,
        batch: args.batch,
        steps: args.steps,
        two_step: args.two_step,
        steps_per_epoch: args.steps_per_epoch,
        schedule: Schedule { lr: args.lr, min_lr: args.min_lr, warmup: args.warmup },
        weight_decay: args.weight_decay,
        valid_frames: args.valid_frames,
        seed: args.seed,
        ..WorldConfig::default()
    };
    let with = With { from: args.from.clone(), memory: args.memory, stop };
    run_on(args.backend, &config, &args.out, Resume::No, with)
}

/// Continues the run in `folder`, if it is one of a world model; perhaps to another step than it was started for, and
/// with another number of last steps.
pub(crate) fn resume(
    folder: &Path,
    resume: Resume,
    [steps, two_step]: [Option<usize>; 2],
    again: Again,
    stop: &Stop,
) -> Option<Result<Ended>> {
    described(folder, |backend, config| {
        if let Some(tokens) = again.eval_tokens {
            bail!("eval-tokens {tokens}: only runs of language models are evaluated");
        }
        let steps = steps.unwrap_or(config.steps);
        let two_step = two_step.unwrap_or(config.two_step);
        let config = WorldConfig { steps, two_step, ..config.clone() };
        run_on(backend, &config, folder, resume, With { from: None, memory: again.memory, stop })
    })
}

/// Saves the model of a checkpoint of the run in `folder`, if it is one of a world model.
pub(crate) fn export(
    folder: &Path,
    step: Option<usize>,
    out: Option<PathBuf>,
    stop: &Stop,
) -> Option<Result<()>> {
    described(folder, |backend, config| {
        dispatch!(backend, Plain, export_from(config, folder, step, out, stop))
    })
}

fn export_from<T: Target>(
    config: &WorldConfig,
    folder: &Path,
    step: Option<usize>,
    out: Option<PathBuf>,
    stop: &Stop,
) -> Result<()> {
    let (world, step) = checkpointed_world(&On::<T>::open()?, config, folder, step)?;
    let out = new_folder(folder, step, out)?;
    stop.making(&out);
    world.save(&out, WeightDtype::F16)?;
    stop.made();
    let (steps, out) = (config.steps, out.display());
    Screen::Out.line(format_args!("the model after step {step} of {steps} is in {out}"))?;
    Ok(())
}

/// Does something with the run in `folder`; `None` if it is none of a world model.
fn described<R>(
    folder: &Path,
    work: impl FnOnce(Backend, &WorldConfig) -> Result<R>,
) -> Option<Result<R>> {
    let config = match world_config(folder) {
        Ok(config) => config?,
        Err(error) => return Some(Err(error.into())),
    };
    let read = || -> Result<Spec> {
        let path = folder.join(SPEC);
        let text = fs::read_to_string(&path)
            .with_context(|| format!("{}: cannot read", path.display()))?;
        serde_json::from_str(&text).with_context(|| path.display().to_string())
    };
    Some(read().and_then(|spec| work(spec.backend, &config)))
}

fn run_on(
    backend: Backend,
    config: &WorldConfig,
    folder: &Path,
    resume: Resume,
    with: With<'_>,
) -> Result<Ended> {
    config.validate()?;
    dispatch!(backend, Autodiff, run(backend, config, folder, resume, with))
}

fn run<T: Target>(
    backend: Backend,
    config: &WorldConfig,
    folder: &Path,
    resume: Resume,
    With { from, memory, stop }: With<'_>,
) -> Result<Ended> {
    let started = Instant::now();
    let out = folder.join("model");
    if out.exists() && !out.is_dir() {
        bail!("{}: is not a folder, the model goes there", out.display());
    }
    let device = On::<T>::open()?;
    check_memory(config, (backend, &*device), memory)?;
    let spec = serde_json::to_string_pretty(&Spec { backend })? + "\n";
    stop.begin(false);
    let trained = train_world(
        &device,
        config,
        WorldRun {
            folder: folder.into(),
            resume,
            from,
            // Training goes on where nobody reads.
            tell: Some(Box::new(|line: &str| drop(Screen::Out.line(line)))),
            tell_every: TELL_EVERY,
            stop: Some(stop.asked.clone()),
            files: vec![(SPEC, spec.into_bytes())],
        },
    );
    stop.end(folder);
    let Some((world, history)) = unless_stopped(trained, folder)? else {
        return Ok(Ended::Stopped);
    };
    world.save(&out, WeightDtype::F16)?;
    chart(&history).write_svg(folder.join("psnr.svg"))?;
    Screen::Out.line(format_args!(
        "trained {} steps in {:.0} s; the model is in {}",
        config.steps,
        started.elapsed().as_secs_f64(),
        out.display()
    ))?;
    Ok(Ended::Finished)
}

/// Checks that training fits into memory, before it starts.
fn check_memory(
    config: &WorldConfig,
    on: (Backend, &Device),
    memory: Option<MemorySize>,
) -> Result<()> {
    let [width, layers] = [config.d_model, config.layers].map(|n| n as f64);
    let model = config.model();
    let Some(seq_len) = model.tokens_per_frame().checked_mul(config.frames) else {
        bail!("frames {}: too many for a sequence", config.frames);
    };
    let sizes = Sizes {
        // Four matrices of attention, those of two norms and two gates, and two of an MLP of four
        // times the width.
        weights: 4.0 * 18.0 * layers * width * width,
        vocabulary: 0.0,
        hidden: width,
        layers,
        qkv_rows: 3.0 * layers * width,
        widest: 4.0 * width,
    };
    let training = TrainConfig { batch: config.batch, seq_len, ..TrainConfig::default() };
    memory::check(&sizes, &training, on, memory)
}

/// What validations measured.
fn chart(history: &WorldHistory) -> Chart {
    let series = |name: &str, of: fn(&kv_train::WorldValid) -> f64| {
        let points = history.valid.iter().map(|record| (record.step as f64, of(record)));
        Series::new(name, points.collect(), Style::LinePoints)
    };
    Chart {
        title: "Frames that the model plays on by itself".into(),
        x_label: "optimizer step".into(),
        y_label: "PSNR against the true frames, dB".into(),
        series: vec![
            series("model", |record| record.psnr),
            series("last frame repeated", |record| record.psnr_of_last),
        ],
        ..Chart::default()
    }
}
