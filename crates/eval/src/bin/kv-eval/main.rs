//! `kv-eval`: perplexity, generation and speed of language models with quantized KV caches.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs print")]

mod backend;
mod bench;
mod common;
mod compare;
mod generate;
mod ppl;
mod source;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Activations are allocated and freed at every layer; the system's allocator gives the pages back
/// and faults them in again each time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

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
    /// Time decode steps by context length.
    Bench(bench::Args),
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
        None => compare::run(&cli.compare),
        Some(Command::Ppl(args)) => ppl::run(&args),
        Some(Command::Generate(args)) => generate::run(&args),
        Some(Command::Bench(args)) => bench::run(&args),
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
