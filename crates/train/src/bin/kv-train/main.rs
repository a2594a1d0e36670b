//! `kv-train`: train small language models from scratch, and fine-tune models for a quantized KV
//! cache.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs print")]

mod args;
mod bench;
mod evaluation;
mod examples;
mod inputs;
mod memory;
mod quantize;
mod run;
mod stop;
mod world;

use std::{cell::Cell, path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use kv_cli::{ThreadArgs, start};
use kv_train::Resume;

use crate::{run::Ended, stop::Stop};

/// Activations are allocated and freed at every layer; the system's allocator gives the pages back
/// and faults them in again each time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Train language models for quantized KV caches.
#[derive(Debug, Parser)]
#[command(version, about, after_help = examples::ALL)]
struct Cli {
    #[command(flatten)]
    threads: ThreadArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Fine-tune a model with the noise of its quantized cache.
    ///
    /// It is trained in f32, whatever the type of its file, and saved in f16.
    #[command(after_help = examples::QAT)]
    Qat(args::Qat),
    /// Train a small Llama-style model from scratch.
    #[command(after_help = examples::PRETRAIN)]
    Pretrain(args::Pretrain),
    /// Train a small world model on frames that are rendered while it trains.
    ///
    /// The game is a maze in the first person. The model is saved in f16, with what makes latents of frames.
    #[command(after_help = examples::WORLD)]
    World(world::Args),
    /// Time and memory of a training step with a quantized cache beside a float one.
    #[command(after_help = examples::BENCH)]
    Bench(bench::Args),
    /// Continue a run that was interrupted, or finish one whose model could not be saved.
    ///
    /// The texts and the model must be those that it was started with.
    #[command(after_help = examples::RESUME)]
    Resume {
        /// The run's folder.
        run: PathBuf,
        /// Continue after this optimizer step's checkpoint instead of the last.
        #[arg(long)]
        from_step: Option<usize>,
        #[command(flatten)]
        again: run::Again,
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
    #[command(after_help = examples::QUANTIZE)]
    Quantize(quantize::Args),
    /// Save the model of one of a run's checkpoints.
    #[command(after_help = examples::EXPORT)]
    Export {
        /// The run's folder.
        run: PathBuf,
        /// The optimizer step of the checkpoint instead of the last.
        #[arg(long)]
        step: Option<usize>,
        /// The model's folder, which must not be there [default: model-STEP in the run's].
        #[arg(long)]
        out: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    let stopped = Cell::new(false);
    let ended =
        |result: anyhow::Result<Ended>| result.map(|ended| stopped.set(ended == Ended::Stopped));
    let code = start(|cli: Cli| {
        cli.threads.start()?;
        let stop = Stop::listen()?;
        ended(match cli.command {
            Command::Qat(args) => args.start().and_then(|start| run::start(&start, &stop)),
            Command::Pretrain(args) => args.start().and_then(|start| run::start(&start, &stop)),
            Command::World(args) => world::start(&args, &stop),
            Command::Bench(args) => bench::run(&args).map(|()| Ended::Finished),
            Command::Quantize(args) => quantize::run(&args, &stop),
            Command::Resume { run, from_step, again, steps, two_step } => {
                let resume = from_step.map_or(Resume::Last, Resume::Step);
                let length = steps.map(|n| ("steps", n)).or(two_step.map(|n| ("two-step", n)));
                match (world::resume(&run, resume, [steps, two_step], again, &stop), length) {
                    (Some(world), _) => world,
                    (None, None) => run::resume(&run, resume, again, &stop),
                    (None, Some((field, n))) => Err(anyhow::anyhow!(
                        "{field} {n}: only runs of world models may have another length"
                    )),
                }
            }
            Command::Export { run, step, out } => {
                let exported = match world::export(&run, step, out.clone(), &stop) {
                    Some(world) => world,
                    None => run::export(&run, step, out, &stop),
                };
                exported.map(|()| Ended::Finished)
            }
        })
    });
    if stopped.get() { ExitCode::from(stop::INTERRUPTED) } else { code }
}
