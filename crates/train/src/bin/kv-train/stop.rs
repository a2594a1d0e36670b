//! Ctrl-C and SIGTERM. During a run, the first signal stops the run with a checkpoint, and the
//! second one ends the program. At other times, the first signal ends the program.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::exit,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::Result;
pub(crate) use kv_cli::INTERRUPTED;
use kv_cli::on_interrupt;
use kv_models::save::staged;
use kv_train::restore_terminal;

/// A request to stop the work in progress.
#[derive(Clone)]
pub(crate) struct Stop {
    /// Becomes true with the first signal.
    pub(crate) asked: Arc<AtomicBool>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    work: Work,
    /// The line to print if a signal ends the program.
    afterwards: Option<String>,
    /// A new folder that is being written; a signal that ends the program removes it.
    making: Option<PathBuf>,
}

/// The work that a signal interrupts.
#[derive(Clone, Copy, Default)]
enum Work {
    /// Work that does not check [`Stop::asked`].
    #[default]
    None,
    /// A run, which stops with a checkpoint. No line can be printed while the dashboard is shown.
    Run { dashboard: bool },
    /// A file, whose writer removes the unfinished part.
    File,
}

impl Stop {
    /// Handles signals from now on.
    pub(crate) fn listen() -> Result<Self> {
        let stop = Self { asked: Arc::default(), state: Arc::default() };
        let heard = stop.clone();
        on_interrupt(move || heard.signalled())?;
        Ok(stop)
    }

    /// Makes the first signal stop the run that starts now. `dashboard` says whether it is shown.
    pub(crate) fn begin(&self, dashboard: bool) {
        self.state().work = Work::Run { dashboard };
    }

    /// Makes signals end the program again, with a line that tells how to resume the run in
    /// `folder`.
    pub(crate) fn end(&self, folder: &Path) {
        let mut state = self.state();
        state.work = Work::None;
        state.afterwards =
            Some(format!("interrupted; continue with kv-train resume {}", folder.display()));
    }

    /// Makes signals only set [`asked`](Self::asked), which the writer of a file checks.
    pub(crate) fn begin_file(&self) {
        self.state().work = Work::File;
    }

    /// Makes a signal that ends the program remove the new `folder`, which is being written.
    pub(crate) fn begin_folder(&self, folder: &Path) {
        self.state().making = Some(folder.into());
    }

    /// Makes signals leave the new folder, which is complete.
    pub(crate) fn end_folder(&self) {
        self.state().making = None;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn signalled(&self) {
        let state = self.state();
        let before = self.asked.swap(true, Ordering::SeqCst);
        match state.work {
            Work::File => {}
            Work::Run { dashboard } if !before => {
                if !dashboard {
                    // An error is ignored, because standard output may be closed.
                    let line = "stopping after a checkpoint; interrupt again to stop at once";
                    let _ = writeln!(io::stdout(), "{line}");
                }
            }
            _ => {
                restore_terminal();
                if let Some(folder) = &state.making {
                    staged::remove_unfinished(folder);
                    // If the folder holds anything else, it stays.
                    let _ = fs::remove_dir(folder);
                }
                if let Some(line) = &state.afterwards {
                    let _ = writeln!(io::stdout(), "{line}");
                }
                exit(INTERRUPTED.into());
            }
        }
    }
}
