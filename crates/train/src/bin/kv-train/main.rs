//! `kv-train`: trains small models from scratch, and fine-tunes models for a quantized KV cache.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs print")]

mod args;
mod bench;
mod evaluation;
mod examples;
mod finish;
mod inputs;
mod memory;
mod quantize;
mod run;
mod spec;
mod stop;
#[cfg(feature = "remote")]
mod worker;
mod world;

use std::{cell::Cell, path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use kv_cli::{ThreadArgs, start};
use kv_train::Resume;

use crate::{run::Outcome, stop::Stop};

/// The system's allocator returns the pages of activations after every layer and faults them in
/// again for the next one; mimalloc keeps them.
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
    /// Fine-tune a model for a quantized cache.
    ///
    /// The model is trained in f32, whatever the type of its file, and saved in f16.
    #[command(after_help = examples::QAT)]
    Qat(args::Qat),
    /// Train a small model from scratch, or go on with one in float.
    #[command(after_help = examples::PRETRAIN)]
    Pretrain(args::Pretrain),
    /// Train a small world model on frames that are rendered during training.
    ///
    /// The game is a first-person maze. The model is saved in f16, with the codec that encodes
    /// frames into latents.
    #[command(after_help = examples::WORLD)]
    World(world::Args),
    /// Measure time and memory of training steps with a quantized cache and with a float cache.
    #[command(after_help = examples::BENCH)]
    Bench(bench::Args),
    /// Resume a run that was interrupted, or finish one whose model could not be saved.
    ///
    /// The texts and the model must be the ones that the run was started with.
    #[command(after_help = examples::RESUME)]
    Resume {
        /// The run's folder.
        run: PathBuf,
        /// Resume after the checkpoint of this optimizer step instead of the last one.
        #[arg(long)]
        from_step: Option<usize>,
        #[command(flatten)]
        args: run::ResumeArgs,
        /// World models only: new number of optimizer steps; the learning rate follows it.
        #[arg(long)]
        steps: Option<usize>,
        /// World models only: number of last steps that train the second denoising step.
        #[arg(long)]
        two_step: Option<usize>,
    },
    /// Serve this machine's devices to runs on other machines.
    ///
    /// Nothing is encrypted: texts, weights and gradients travel as they are, and the token only
    /// keeps other clients out. Use it in a trusted network.
    #[cfg(feature = "remote")]
    #[command(after_help = examples::WORKER)]
    Worker(worker::Args),
    /// Quantize the matrices of a model into a new folder.
    ///
    /// Reads any supported model, quantized or not. Vectors, positions and routers stay in float.
    #[command(after_help = examples::QUANTIZE)]
    Quantize(quantize::Args),
    /// Save the model of a run's checkpoint.
    #[command(after_help = examples::EXPORT)]
    Export {
        /// The run's folder.
        run: PathBuf,
        /// Optimizer step of the checkpoint instead of the last one.
        #[arg(long)]
        step: Option<usize>,
        /// Folder of the model, which must not exist [default: model-STEP in the run's folder].
        #[arg(long)]
        out: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    let stopped = Cell::new(false);
    let ended = |result: anyhow::Result<Outcome>| {
        result.map(|ended| stopped.set(ended == Outcome::Stopped))
    };
    let code = start(|cli: Cli| {
        cli.threads.start()?;
        let stop = Stop::listen()?;
        #[cfg(feature = "remote")]
        kv_cli::before_exit(kv_train::restore_terminal);
        ended(match cli.command {
            Command::Qat(args) => args.start().and_then(|start| run::start(&start, &stop)),
            Command::Pretrain(args) => args.start().and_then(|start| run::start(&start, &stop)),
            Command::World(args) => world::start(&args, &stop),
            Command::Bench(args) => bench::run(&args).map(|()| Outcome::Finished),
            #[cfg(feature = "remote")]
            Command::Worker(args) => worker::run(&args).map(|()| Outcome::Finished),
            Command::Quantize(args) => quantize::run(&args, &stop),
            Command::Resume { run, from_step, args, steps, two_step } => {
                let resume = from_step.map_or(Resume::Last, Resume::Step);
                let length = steps.map(|n| ("steps", n)).or(two_step.map(|n| ("two-step", n)));
                match (world::resume(&run, resume, [steps, two_step], &args, &stop), length) {
                    (Some(world), _) => world,
                    (None, None) => run::resume(&run, resume, args, &stop),
                    (None, Some((field, n))) => Err(anyhow::anyhow!(
                        "{field} {n}: only runs of world models can change their number of steps"
                    )),
                }
            }
            Command::Export { run, step, out } => {
                let exported = match world::export(&run, step, out.clone(), &stop) {
                    Some(world) => world,
                    None => run::export(&run, step, out, &stop),
                };
                exported.map(|()| Outcome::Finished)
            }
        })
    });
    if stopped.get() { ExitCode::from(stop::INTERRUPTED) } else { code }
}
