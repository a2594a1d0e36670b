//! `kv-train`: train small language models from scratch, and fine-tune models for a quantized KV
//! cache.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs print")]

mod args;
mod bench;
mod quantize;
mod run;
mod stop;

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
        Command::Bench(args) => bench::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Resume { run, from_step, plain } => {
            ended(run::resume(&run, from_step.map_or(Resume::Last, Resume::Step), plain))
        }
        Command::Export { run, step, out } => run::export(&run, step, out),
    });
    if stopped.get() { ExitCode::from(stop::INTERRUPTED) } else { code }
}
