//! Ctrl-C and SIGTERM.

use std::thread;

use anyhow::{Context, Result};

/// The exit code of a program that was interrupted.
pub const INTERRUPTED: u8 = 130;

/// Calls `told` on a thread of its own for every Ctrl-C and SIGTERM from now on, which then do nothing else.
///
/// # Errors
/// What the system says.
#[cfg(unix)]
pub fn on_interrupt(mut told: impl FnMut() + Send + 'static) -> Result<()> {
    use signal_hook::{
        consts::{SIGINT, SIGTERM},
        iterator::Signals,
    };
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot listen to signals")?;
    thread::spawn(move || signals.forever().for_each(|_| told()));
    Ok(())
}

/// Calls `told` on a thread of its own for every Ctrl-C and SIGTERM from now on, which then do nothing else. On this
/// system a signal sets a flag, which the thread polls.
///
/// # Errors
/// What the system says.
#[cfg(not(unix))]
pub fn on_interrupt(mut told: impl FnMut() + Send + 'static) -> Result<()> {
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
                told();
            }
            thread::sleep(Duration::from_millis(50));
        }
    });
    Ok(())
}
