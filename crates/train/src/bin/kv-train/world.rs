//! `kv-train world`.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use kv_cli::{Backend, MemorySize, Plain, Screen, dispatch};
use kv_eval::world::LayerCaches;
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
    run::{Outcome, ResumeArgs, new_folder, unless_stopped},
    stop::Stop,
};

/// Training steps between two printed lines.
const LOG_EVERY: usize = 10;

/// Arguments of `kv-train world`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Folder of the new run; it must not hold another run.
    #[arg(long)]
    out: PathBuf,
    /// Folder of a model of the same shape and maze, to start from instead of random weights.
    #[arg(long)]
    from: Option<PathBuf>,
    /// Backend to train on.
    #[arg(long, value_enum, default_value = "flex")]
    backend: Backend,
    /// Seed of the maze.
    #[arg(long, default_value_t = WorldConfig::default().maze)]
    maze: u64,
    /// Width and height in pixels of the patch that becomes one token.
    #[arg(long, default_value_t = WorldConfig::default().patch)]
    patch: usize,
    /// Channels that encode a patch.
    #[arg(long, default_value_t = WorldConfig::default().channels)]
    channels: usize,
    /// Width of the residual stream.
    #[arg(long, default_value_t = WorldConfig::default().d_model)]
    hidden: usize,
    /// Number of layers.
    #[arg(long, default_value_t = WorldConfig::default().layers)]
    layers: usize,
    /// Number of heads.
    #[arg(long, default_value_t = WorldConfig::default().heads)]
    heads: usize,
    /// One layer in LOCAL_IDX is global and sees all frames of a sequence; the others are local.
    #[arg(long, default_value_t = WorldConfig::default().local_idx)]
    local_idx: usize,
    /// Newest frames that local layers see.
    #[arg(long, default_value_t = WorldConfig::default().local_window.0)]
    local_window: u64,
    /// Frames per sequence.
    #[arg(long, default_value_t = WorldConfig::default().frames)]
    frames: usize,
    /// Cache to train for: a short name such as kint8vint8, or a policy file (.json or .toml). A
    /// frame then sees the frames before it as the cache stores them. The suffix @2 applies it to
    /// the last two layers alone, @k2 only the keys to the last two.
    #[arg(long, default_value_t = WorldConfig::default().cache)]
    cache: LayerCaches,
    /// Sequences per optimizer step.
    #[arg(long, default_value_t = WorldConfig::default().batch)]
    batch: usize,
    /// Optimizer steps.
    #[arg(long, default_value_t = WorldConfig::default().steps)]
    steps: usize,
    /// Number of last steps that train the second denoising step, which finishes the model's own
    /// frames.
    #[arg(long, default_value_t = WorldConfig::default().two_step)]
    two_step: usize,
    /// Optimizer steps between validations and checkpoints; the last step always has both.
    #[arg(long, default_value_t = WorldConfig::default().steps_per_epoch)]
    steps_per_epoch: usize,
    /// Highest learning rate.
    #[arg(long, default_value_t = WorldConfig::default().schedule.lr)]
    lr: f64,
    /// Learning rate of the last step.
    #[arg(long, default_value_t = WorldConfig::default().schedule.min_lr)]
    min_lr: f64,
    /// Optimizer steps of linear warm-up.
    #[arg(long, default_value_t = WorldConfig::default().schedule.warmup)]
    warmup: usize,
    /// Decoupled weight decay of matrices.
    #[arg(long, default_value_t = WorldConfig::default().weight_decay)]
    weight_decay: f32,
    /// Frames that the model generates in each episode of a validation.
    #[arg(long, default_value_t = WorldConfig::default().valid_frames)]
    valid_frames: usize,
    /// Seed of the weights, the episodes and the noise.
    #[arg(long, default_value_t = WorldConfig::default().seed)]
    seed: u64,
    /// Memory limit for training, such as 16G [default: the free memory].
    #[arg(long)]
    memory: Option<MemorySize>,
}

/// The settings of a run that do not decide its result, and its initial model.
struct RunOptions<'a> {
    from: Option<PathBuf>,
    memory: Option<MemorySize>,
    stop: &'a Stop,
}

/// The saved settings of a run that do not decide its result.
#[derive(Debug, Serialize, Deserialize)]
struct Spec {
    backend: Backend,
}

/// The file name of [`Spec`].
const SPEC: &str = "run.json";

pub(crate) fn start(args: &Args, stop: &Stop) -> Result<Outcome> {
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
        cache: args.cache.clone(),
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
    let options = RunOptions { from: args.from.clone(), memory: args.memory, stop };
    run_on(args.backend, &config, &args.out, Resume::No, options)
}

/// Resumes the run in `folder`, perhaps with another number of steps; `None` if it does not train a
/// world model.
pub(crate) fn resume(
    folder: &Path,
    resume: Resume,
    [steps, two_step]: [Option<usize>; 2],
    args: &ResumeArgs,
    stop: &Stop,
) -> Option<Result<Outcome>> {
    described(folder, |backend, config| {
        if let Some(tokens) = args.eval_tokens {
            bail!("eval-tokens {tokens}: runs of world models are not evaluated; leave it out");
        }
        if let Some(devices) = &args.devices {
            bail!("devices {devices}: world models train on one device; leave it out");
        }
        let steps = steps.unwrap_or(config.steps);
        let two_step = two_step.unwrap_or(config.two_step);
        let config = WorldConfig { steps, two_step, ..config.clone() };
        run_on(
            backend,
            &config,
            folder,
            resume,
            RunOptions { from: None, memory: args.memory, stop },
        )
    })
}

/// Saves the model of a checkpoint of the run in `folder`; `None` if it does not train a world
/// model.
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
    stop.begin_folder(&out);
    world.save(&out, WeightDtype::F16)?;
    stop.end_folder();
    let (steps, out) = (config.steps, out.display());
    Screen::Out.line(format_args!("the model after step {step} of {steps} is in {out}"))?;
    Ok(())
}

/// Calls `work` with the run in `folder`; `None` if it does not train a world model.
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
    options: RunOptions<'_>,
) -> Result<Outcome> {
    config.validate()?;
    dispatch!(backend, Autodiff, run(backend, config, folder, resume, options))
}

fn run<T: Target>(
    backend: Backend,
    config: &WorldConfig,
    folder: &Path,
    resume: Resume,
    RunOptions { from, memory, stop }: RunOptions<'_>,
) -> Result<Outcome> {
    let started = Instant::now();
    let out = folder.join("model");
    if out.exists() && !out.is_dir() {
        bail!("{}: is not a folder, but the model is saved there; move it away", out.display());
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
            // Training continues even if nobody reads the output.
            log: Some(Box::new(|line: &str| drop(Screen::Out.line(line)))),
            log_every: LOG_EVERY,
            stop: Some(stop.asked.clone()),
            files: vec![(SPEC, spec.into_bytes())],
        },
    );
    stop.end(folder);
    let Some((world, history)) = unless_stopped(trained, folder)? else {
        return Ok(Outcome::Stopped);
    };
    world.save(&out, WeightDtype::F16)?;
    chart(&history).write_svg(folder.join("psnr.svg"))?;
    Screen::Out.line(format_args!(
        "trained {} steps in {:.0} s; the model is in {}",
        config.steps,
        started.elapsed().as_secs_f64(),
        out.display()
    ))?;
    Ok(Outcome::Finished)
}

/// Checks before training that it fits into memory.
fn check_memory(
    config: &WorldConfig,
    on: (Backend, &Device),
    memory: Option<MemorySize>,
) -> Result<()> {
    let [width, layers] = [config.d_model, config.layers].map(|n| n as f64);
    let model = config.model();
    let Some(seq_len) = model.tokens_per_frame().checked_mul(config.frames) else {
        bail!("frames {}: too many for one sequence; choose fewer", config.frames);
    };
    let sizes = Sizes {
        // Four matrices of attention, four of norms and gates, and two of an MLP of four times the
        // width.
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

/// Draws the PSNRs of all validations.
fn chart(history: &WorldHistory) -> Chart {
    let series = |name: &str, of: fn(&kv_train::WorldValid) -> f64| {
        let points = history.valid.iter().map(|record| (record.step as f64, of(record)));
        Series::new(name, points.collect(), Style::LinePoints)
    };
    Chart {
        title: "Frames that the model generates".into(),
        x_label: "optimizer step".into(),
        y_label: "PSNR against the true frames, dB".into(),
        series: vec![
            series("model", |record| record.psnr),
            series("last frame repeated", |record| record.psnr_of_last),
        ],
        ..Chart::default()
    }
}
