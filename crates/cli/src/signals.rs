//! Ctrl-C and SIGTERM.

use std::{process::exit, thread};

use anyhow::{Context, Result};

use crate::output::writing;

/// The exit code of a program that was interrupted.
pub const INTERRUPTED: u8 = 130;

/// Ends the program with [`INTERRUPTED`]. A file that is being written is finished first.
pub fn exit_interrupted() -> ! {
    let _whole = writing();
    exit(INTERRUPTED.into())
}

/// Has Ctrl-C and SIGTERM [end the program](exit_interrupted) from now on.
///
/// # Errors
/// Fails with the error of the system.
pub fn exit_on_interrupt() -> Result<()> {
    on_interrupt(|| exit_interrupted())
}

/// Calls `handler` on a thread of its own for every Ctrl-C and SIGTERM from now on, which then do
/// nothing else.
///
/// # Errors
/// Fails with the error of the system.
#[cfg(unix)]
pub fn on_interrupt(mut handler: impl FnMut() + Send + 'static) -> Result<()> {
    use signal_hook::{
        consts::{SIGINT, SIGTERM},
        iterator::Signals,
    };
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot listen to signals")?;
    thread::spawn(move || signals.forever().for_each(|_| handler()));
    Ok(())
}

/// Calls `handler` on a thread of its own for every Ctrl-C and SIGTERM from now on, which then do
/// nothing else. On this system a signal sets a flag, which the thread polls.
///
/// # Errors
/// Fails with the error of the system.
#[cfg(not(unix))]
pub fn on_interrupt(mut handler: impl FnMut() + Send + 'static) -> Result<()> {
    use std::{
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering},
        },
        time::Duration,
    };

    use signal_hook::{consts::SIGINT, consts::SIGTERM, flag::register};

    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        register(signal, flag.clone()).context("cannot listen to signals")?;
    }
    thread::spawn(move || {
        loop {
            if flag.swap(false, Ordering::SeqCst) {
                handler();
            }
            thread::sleep(Duration::from_millis(50));
        }
    });
    Ok(())
}
