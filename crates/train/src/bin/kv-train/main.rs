//! `kv-train`: train small language models from scratch, and fine-tune models for a quantized KV
//! cache.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs print")]

mod args;
mod bench;
mod quantize;
mod run;
mod stop;
mod world;

use std::{cell::Cell, path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use kv_cli::start;
use kv_train::Resume;

use crate::run::Ended;

/// Activations are allocated and freed at every layer; the system's allocator gives the pages back
/// and faults them in again each time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Train language models for quantized KV caches.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Fine-tune a model with the noise of its quantized cache.
    ///
    /// It is trained in f32, whatever the type of its file, and saved in f16.
    Qat(args::Qat),
    /// Train a small Llama-style model from scratch.
    Pretrain(args::Pretrain),
    /// Train a small world model on frames that are rendered while it trains.
    ///
    /// The game is a maze in the first person. The model is saved in f16, with what makes latents of frames.
    World(world::Args),
    /// Time and memory of a training step with a quantized cache beside a float one.
    Bench(bench::Args),
    /// Continue a run that was interrupted, or finish one whose model could not be saved.
    Resume {
        /// The run's folder.
        run: PathBuf,
        /// Continue after this optimizer step's checkpoint instead of the last.
        #[arg(long)]
        from_step: Option<usize>,
        /// Print a line for every few steps, on a terminal too, instead of the dashboard.
        #[arg(long)]
        plain: bool,
        /// Of a world model: end after this optimizer step, and lower the learning rate until then.
        #[arg(long)]
        steps: Option<usize>,
        /// Of a world model: how many of the last steps are those in which it learns to finish what it made of noise.
        #[arg(long)]
        two_step: Option<usize>,
    },
    /// Quantize the matrices of a model into a new folder.
    ///
    /// From any model that is read here, restored where its file has blocks. Vectors, positions and routers stay in
    /// floats.
    Quantize(quantize::Args),
    /// Save the model of one of a run's checkpoints.
    Export {
        /// The run's folder.
        run: PathBuf,
        /// The optimizer step of the checkpoint instead of the last.
        #[arg(long)]
        step: Option<usize>,
        /// The model's folder instead of model-STEP in the run's.
        #[arg(long)]
        out: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    let stopped = Cell::new(false);
    let ended =
        |result: anyhow::Result<Ended>| result.map(|ended| stopped.set(ended == Ended::Stopped));
    let code = start(|cli: Cli| match cli.command {
        Command::Qat(args) => ended(args.start().and_then(|start| run::start(&start))),
        Command::Pretrain(args) => ended(args.start().and_then(|start| run::start(&start))),
        Command::World(args) => ended(world::start(&args)),
        Command::Bench(args) => bench::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Resume { run, from_step, plain, steps, two_step } => {
            let resume = from_step.map_or(Resume::Last, Resume::Step);
            let length = steps.map(|n| ("steps", n)).or(two_step.map(|n| ("two-step", n)));
            ended(match (world::resume(&run, resume, steps, two_step), length) {
                (Some(world), _) => world,
                (None, None) => run::resume(&run, resume, plain),
                (None, Some((field, n))) => Err(anyhow::anyhow!(
                    "{field} {n}: only runs of world models may have another length"
                )),
            })
        }
        Command::Export { run, step, out } => match world::export(&run, step, out.clone()) {
            Some(world) => world,
            None => run::export(&run, step, out),
        },
    });
    if stopped.get() { ExitCode::from(stop::INTERRUPTED) } else { code }
}
