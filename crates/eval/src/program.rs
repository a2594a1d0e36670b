//! What the workspace's programs share: where they run, and how they start and say what went wrong.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs print")]

use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};

/// Where to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// The CPU.
    Flex,
    /// Vulkan, Metal or DirectX 12 through WGPU.
    Wgpu,
    /// NVIDIA CUDA.
    Cuda,
}

/// A target as it is, for [`dispatch!`](crate::dispatch).
pub type Plain<T> = T;

/// Calls `$run::<$wrap<Target>>($args)` for the chosen [`Backend`], or says which feature of the
/// calling program builds it in.
#[macro_export]
macro_rules! dispatch {
    ($backend:expr, $wrap:ident, $run:ident($($arg:expr),*)) => {
        match $backend {
            #[cfg(feature = "flex")]
            $crate::program::Backend::Flex => $run::<$wrap<$crate::kv_cubecl::Flex>>($($arg),*),
            #[cfg(feature = "wgpu")]
            $crate::program::Backend::Wgpu => $run::<$wrap<$crate::kv_cubecl::Wgpu>>($($arg),*),
            #[cfg(feature = "cuda")]
            $crate::program::Backend::Cuda => $run::<$wrap<$crate::kv_cubecl::Cuda>>($($arg),*),
            #[allow(unreachable_patterns, reason = "with every backend built in")]
            other => Err($crate::program::not_built_in(other, env!("CARGO_BIN_NAME"))),
        }
    };
}

/// The error for a backend whose feature is off in `program`.
pub fn not_built_in(backend: Backend, program: &str) -> anyhow::Error {
    let name = format!("{backend:?}").to_lowercase();
    anyhow::anyhow!(
        "backend {name} is not built into this {program}: build it with --features {name}"
    )
}

/// The body of a `main`: parses the command line and calls `run` with it. A mistake is one line on
/// standard error, with exit code 2 in the command line and 1 after it. To be called before other
/// threads are started.
pub fn start<C: Parser>(run: impl FnOnce(C) -> anyhow::Result<()>) -> ExitCode {
    keep_freed_memory();
    let cli = match C::try_parse() {
        Ok(cli) => cli,
        // Help and versions are no mistakes.
        Err(error) if error.exit_code() == 0 => {
            print!("{error}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("{}", usage_line(&error));
            return ExitCode::from(2);
        }
    };
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", error_line(&error));
            ExitCode::FAILURE
        }
    }
}

/// What is wrong with a command line, on one line: the first paragraph.
fn usage_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.lines().map(str::trim).take_while(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(" ")
}

/// An error on one line: the message, then each cause that adds something to it.
fn error_line(error: &anyhow::Error) -> String {
    let mut line = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Has mimalloc, where it is the allocator, keep freed memory: a training step or forward pass asks
/// for the same again at once, and having the system clear its pages anew takes as long as computing
/// on them. To be called before other threads are started.
fn keep_freed_memory() {
    // Milliseconds before freed pages are given back, -1 for never; mimalloc.h has the number.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    // SAFETY: sets an option of the allocator before other threads are started.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) }
}
