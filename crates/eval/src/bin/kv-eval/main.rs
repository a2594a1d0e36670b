//! `kv-eval`: perplexity, generation and speed of language models with quantized KV caches.

mod arguments;
mod bench;
mod built_in;
mod common;
mod compare;
mod continuation;
mod generate;
mod generate_conversation;
mod generate_interrupt;
mod generate_reply;
mod generate_sampling;
mod generate_several;
mod generate_writer;
mod index;
mod json;
mod needle;
mod plan;
mod policy_file;
mod ppl;
mod profile;
mod search;
mod tasks;
mod twin;
mod version;
mod world;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use kv_cli::{ThreadArgs, start};
use kv_eval::memory::Tracking;
use mimalloc::MiMalloc;

/// Activations are allocated and freed at every layer; the system's allocator gives the pages back
/// and faults them in again each time.
#[global_allocator]
static ALLOCATOR: Tracking<MiMalloc> = Tracking::new(MiMalloc);

/// Evaluate language models with quantized KV caches.
///
/// Without a command, compares a small built-in model with float, 4-bit and 2-bit caches to the
/// same model after training with its cache. Prints a table and writes a report with charts.
#[derive(Debug, Parser)]
#[command(version, long_version = version::long(), about, args_conflicts_with_subcommands = true)]
#[command(after_help = "Examples:
  kv-eval
  kv-eval --tokens 8192 --report my-report
  kv-eval ppl --model models/austen --text models/austen/heldout.txt --cache k4v4
  kv-eval plan --model Llama-3.1-8B --context 32768 --memory 16G

--version says where models, reports and temporary files are.")]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    compare: compare::Args,
    #[command(flatten)]
    threads: ThreadArgs,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure the perplexity of a text, and the divergence of each cache from the float cache.
    Ppl(ppl::Args),
    /// Continue a prompt, or chat with a model.
    Generate(generate::Args),
    /// Compare a model's memory use across cache formats, with the longest context and largest
    /// batch that fit.
    Plan(plan::Args),
    /// Compare a quantized cache with a float cache by token and layer.
    Twin(twin::Args),
    /// Measure how many entries indexers select right with quantized keys.
    Index(index::Args),
    /// Hide passages or values in a long text, and see what the model finds again.
    Needle(needle::Args),
    /// Continue passages of a text, and count the tokens before a cache changes the output.
    Continue(continuation::Args),
    /// Score multiple-choice tasks and continuations as lm-evaluation-harness does.
    Tasks(tasks::Args),
    /// Find the best per-layer cache policy within a byte budget.
    Search(search::Args),
    /// Let a world model continue games with different caches, and compare its frames with the true
    /// ones.
    World(world::Args),
    /// Time attention, caches and whole models by context length.
    Bench(bench::Args),
}

fn main() -> ExitCode {
    start(|cli: Cli| {
        cli.threads.start()?;
        match cli.command {
            None => compare::run(&cli.compare),
            Some(Command::Ppl(args)) => ppl::run(&args),
            Some(Command::Generate(args)) => generate::run(&args),
            Some(Command::Plan(args)) => plan::run(&args),
            Some(Command::Twin(args)) => twin::run(&args),
            Some(Command::Index(args)) => index::run(&args),
            Some(Command::Needle(args)) => needle::run(&args),
            Some(Command::Continue(args)) => continuation::run(&args),
            Some(Command::Tasks(args)) => tasks::run(&args),
            Some(Command::Search(args)) => search::run(&args),
            Some(Command::World(args)) => world::run(&args),
            Some(Command::Bench(bench)) => bench::run(&bench),
        }
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// Every command has examples, and each is a command line.
    #[test]
    fn examples_are_command_lines() {
        let mut commands = vec![Cli::command()];
        while let Some(command) = commands.pop() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let examples = help.lines().filter(|line| line.starts_with("  kv-eval"));
            let examples: Vec<&str> = examples.collect();
            let name = command.get_name();
            assert!(!examples.is_empty(), "{name} has no examples");
            for example in examples {
                // Arguments in quotes are one.
                let mut words: Vec<String> = vec![];
                for (i, part) in example.split('"').enumerate() {
                    match i % 2 {
                        0 => words.extend(part.split_whitespace().map(str::to_string)),
                        _ => words.push(part.to_string()),
                    }
                }
                if let Err(error) = Cli::try_parse_from(words) {
                    panic!("{example}: {error}");
                }
            }
            commands
                .extend(command.get_subcommands().filter(|it| it.get_name() != "help").cloned());
        }
    }
}
