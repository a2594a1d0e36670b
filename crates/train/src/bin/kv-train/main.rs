//! `kv-train`: train small language models from scratch, and fine-tune models for a quantized KV
//! cache.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs print")]

mod args;
mod bench;
mod run;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use kv_cli::start;
use kv_train::Resume;

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
    Qat(args::Qat),
    /// Train a small Llama-style model from scratch.
    Pretrain(args::Pretrain),
    /// Time and memory of a training step with a quantized cache beside a float one.
    Bench(bench::Args),
    /// Continue a run that was interrupted.
    Resume {
        /// The run's folder.
        run: PathBuf,
        /// Continue after this epoch's checkpoint instead of the last.
        #[arg(long)]
        from_epoch: Option<usize>,
    },
}

fn main() -> ExitCode {
    start(|cli: Cli| match cli.command {
        Command::Qat(args) => args.spec().and_then(|(spec, out)| run::start(&spec, &out)),
        Command::Pretrain(args) => args.spec().and_then(|(spec, out)| run::start(&spec, &out)),
        Command::Bench(args) => bench::run(&args),
        Command::Resume { run, from_epoch } => {
            run::resume(&run, from_epoch.map_or(Resume::Last, Resume::Epoch))
        }
    })
}
