//! From a command line to an exit code.

use std::process::ExitCode;

use clap::Parser;

use crate::Screen;

/// The body of a `main`: parses the command line and calls `run` with it. A mistake is one line on
/// standard error, with exit code 2 in the command line and 1 after it. To be called before other
/// threads are started.
pub fn start<C: Parser>(run: impl FnOnce(C) -> anyhow::Result<()>) -> ExitCode {
    keep_freed_memory();
    let cli = match C::try_parse() {
        Ok(cli) => cli,
        // Help and versions are no mistakes.
        Err(error) if error.exit_code() == 0 => {
            return match Screen::Out.print(error) {
                Ok(_) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            };
        }
        Err(error) => {
            // Where nobody reads errors there is nobody to tell.
            let _ = Screen::Error.line(usage_line(&error));
            return ExitCode::from(2);
        }
    };
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = Screen::Error.line(format_args!("error: {}", error_line(&error)));
            ExitCode::FAILURE
        }
    }
}

/// What is wrong with a command line, on one line: the first paragraph, and what was meant instead.
fn usage_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let what = lines.iter().copied().take_while(|line| !line.is_empty());
    let mut line = what.collect::<Vec<_>>().join(" ");
    for tip in lines.iter().filter_map(|line| line.strip_prefix("tip: ")) {
        line = format!("{line}; {tip}");
    }
    line
}

/// An error on one line: the message, then each cause that adds something to it.
pub(crate) fn error_line(error: &anyhow::Error) -> String {
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
