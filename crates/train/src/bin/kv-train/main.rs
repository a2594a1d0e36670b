//! `kv-train`: train small language models from scratch, and fine-tune models for a quantized KV
//! cache.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs print")]

mod args;
mod backend;
mod bench;
mod run;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
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

/// Help and versions as they are; of a mistake, the first paragraph on one line.
fn usage(error: &clap::Error) -> ExitCode {
    let text = error.to_string();
    if error.exit_code() == 0 {
        print!("{text}");
        return ExitCode::SUCCESS;
    }
    let lines = text.lines().map(str::trim).take_while(|line| !line.is_empty());
    eprintln!("{}", lines.collect::<Vec<_>>().join(" "));
    ExitCode::from(2)
}

/// Keeps freed memory: a training step or forward pass asks for the same again at once, and having
/// the system clear its pages anew takes as long as computing on them.
fn keep_freed_memory() {
    // Milliseconds before freed pages are given back, -1 for never; mimalloc.h has the number.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    // SAFETY: sets an option of the allocator before other threads are started.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) }
}

fn main() -> ExitCode {
    keep_freed_memory();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let outcome = match cli.command {
        Command::Qat(args) => args.spec().and_then(|(spec, out)| run::start(&spec, &out)),
        Command::Pretrain(args) => args.spec().and_then(|(spec, out)| run::start(&spec, &out)),
        Command::Bench(args) => bench::run(&args),
        Command::Resume { run, from_epoch } => {
            run::resume(&run, from_epoch.map_or(Resume::Last, Resume::Epoch))
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One line: the message, then each cause that adds something to it.
            let mut line = error.to_string();
            for cause in error.chain().skip(1).map(ToString::to_string) {
                if !line.contains(&cause) {
                    line = format!("{line}: {cause}");
                }
            }
            eprintln!("error: {}", line.split_whitespace().collect::<Vec<_>>().join(" "));
            ExitCode::FAILURE
        }
    }
}
