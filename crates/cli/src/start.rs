//! From a command line to an exit code.

use core::ffi::c_long;
use std::process::ExitCode;

use clap::Parser;

use crate::Screen;

/// The body of a `main`: parses the command line and calls `run` with it. An error is one line on
/// standard error; the exit code is 2 for a mistake in the command line and 1 for any other error.
/// Must be called before other threads are started.
pub fn start<C: Parser>(run: impl FnOnce(C) -> anyhow::Result<()>) -> ExitCode {
    keep_freed_memory();
    let cli = match C::try_parse() {
        Ok(cli) => cli,
        // `--help` and `--version` are not errors.
        Err(error) if error.exit_code() == 0 => {
            return match Screen::Out.print(error) {
                Ok(_) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            };
        }
        Err(error) => {
            // If standard error cannot be written, there is nowhere to report that.
            let _ = Screen::Error.line(usage_line(&error));
            return ExitCode::from(2);
        }
    };
    let run = || run(cli);
    #[cfg(feature = "remote")]
    let run = || crate::devices::guarded(run);
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = Screen::Error.line(format_args!("error: {}", error_line(&error)));
            ExitCode::FAILURE
        }
    }
}

/// Returns the program's name and its arguments, for reports. Bytes that are not UTF-8 become
/// U+FFFD.
pub fn command_line() -> Vec<String> {
    std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect()
}

/// Puts a usage error on one line: the first paragraph of clap's message, then its
/// tips.
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
pub fn error_line(error: &anyhow::Error) -> String {
    let mut line = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Makes mimalloc, if it is the allocator, keep freed memory. The next training step or forward
/// pass asks for the same amounts again, and new pages, which the system has to clear, take as long
/// as the computation on them.
fn keep_freed_memory() {
    give_back_after(-1);
}

/// Runs `work` that needs much memory once, such as a load. If mimalloc is the allocator, it then
/// releases all freed memory.
pub fn once<T>(work: impl FnOnce() -> T) -> T {
    give_back_after(0);
    let done = work();
    // SAFETY: it has no conditions.
    unsafe { libmimalloc_sys::mi_collect(true) };
    keep_freed_memory();
    done
}

/// Sets the milliseconds after which mimalloc gives freed pages back to the system; -1 is never.
fn give_back_after(milliseconds: c_long) {
    // The number of the option in mimalloc.h.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    // SAFETY: the option is one word; other threads read either the old or the new value.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, milliseconds) }
}
