//! Ctrl-C and SIGTERM: the first signal stops the run, with a checkpoint; a second one ends the
//! program.

use std::{
    io::{self, Write},
    path::Path,
    process::exit,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::Result;
pub(crate) use kv_cli::INTERRUPTED;
use kv_cli::on_interrupt;
use kv_train::restore_terminal;

/// A request to stop the run in progress.
#[derive(Clone)]
pub(crate) struct Stop {
    /// Becomes true with the first signal.
    pub(crate) asked: Arc<AtomicBool>,
    /// Whether a run is in progress, which watches `asked`.
    running: Arc<AtomicBool>,
    /// Whether there is no dashboard, so that a line can be printed.
    plain: Arc<AtomicBool>,
    /// What to say when the program ends after the last step.
    afterwards: Arc<OnceLock<String>>,
}

impl Stop {
    /// Handles signals from now on. While no run is in progress, they end the program.
    pub(crate) fn listen() -> Result<Self> {
        let stop = Self {
            asked: Arc::default(),
            running: Arc::default(),
            plain: Arc::default(),
            afterwards: Arc::default(),
        };
        let heard = stop.clone();
        on_interrupt(move || heard.signalled())?;
        Ok(stop)
    }

    /// Makes the first signal stop the run that begins now. `dashboard` says whether the run shows
    /// one.
    pub(crate) fn begin(&self, dashboard: bool) {
        self.plain.store(!dashboard, Ordering::SeqCst);
        self.running.store(true, Ordering::SeqCst);
    }

    /// Makes signals end the program again, with a line that says how to resume the run in
    /// `folder`.
    pub(crate) fn end(&self, folder: &Path) {
        let line = format!("ended; go on with kv-train resume {}", folder.display());
        // Only the first call sets it.
        let _ = self.afterwards.set(line);
        self.running.store(false, Ordering::SeqCst);
    }

    fn signalled(&self) {
        if !self.running.load(Ordering::SeqCst) || self.asked.swap(true, Ordering::SeqCst) {
            restore_terminal();
            if let Some(line) = self.afterwards.get() {
                let _ = writeln!(io::stdout(), "{line}");
            }
            exit(INTERRUPTED.into());
        }
        if self.plain.load(Ordering::SeqCst) {
            // An error is ignored, because standard output may be closed.
            let line = "stopping as soon as there is a checkpoint; a second time, at once";
            let _ = writeln!(io::stdout(), "{line}");
        }
    }
}
