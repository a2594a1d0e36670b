//! `kv-eval`: perplexity, generation and speed of language models with quantized KV caches.

mod bench;
mod common;
mod compare;
mod generate;
mod generate_several;
mod loading;
mod ppl;
mod profile;
mod source;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use kv_cli::start;
use kv_eval::memory::Tracking;
use mimalloc::MiMalloc;

/// Activations are allocated and freed at every layer; the system's allocator gives the pages back
/// and faults them in again each time.
#[global_allocator]
static ALLOCATOR: Tracking<MiMalloc> = Tracking::new(MiMalloc);

/// Evaluate language models with quantized KV caches.
///
/// Without a command, the repository's model with float, 4-bit and 2-bit caches is compared with the
/// same model after training with its cache: one table, and a report with charts.
#[derive(Debug, Parser)]
#[command(version, about, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    compare: compare::Args,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Perplexity of a text, and the divergence of each cache from the float one.
    Ppl(ppl::Args),
    /// Continue a prompt.
    Generate(generate::Args),
    /// Time attention, caches and whole models by context length.
    Bench(bench::Args),
}

fn main() -> ExitCode {
    start(|cli: Cli| match cli.command {
        None => compare::run(&cli.compare),
        Some(Command::Ppl(args)) => ppl::run(&args),
        Some(Command::Generate(args)) => generate::run(&args),
        Some(Command::Bench(bench)) => bench::run(&bench),
    })
}
