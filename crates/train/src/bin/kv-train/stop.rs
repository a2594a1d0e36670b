//! Ctrl-C and SIGTERM. The first signal stops a run, with a checkpoint, and a second one ends the
//! program; with nothing to finish, the first one ends it.

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

/// A request to stop what is in progress.
#[derive(Clone)]
pub(crate) struct Stop {
    /// Becomes true with the first signal.
    pub(crate) asked: Arc<AtomicBool>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    work: Work,
    /// What to say when a signal ends the program.
    afterwards: Option<String>,
    /// A new folder that is being written, which a signal that ends the program removes.
    making: Option<PathBuf>,
}

/// What a signal interrupts.
#[derive(Clone, Copy, Default)]
enum Work {
    /// Nothing that watches [`Stop::asked`].
    #[default]
    None,
    /// A run, which stops with a checkpoint. On a dashboard no line can be printed.
    Run { dashboard: bool },
    /// A file, whose unfinished part is removed by its writer.
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

    /// Makes the first signal stop the run that begins now. `dashboard` says whether the run shows
    /// one.
    pub(crate) fn begin(&self, dashboard: bool) {
        self.state().work = Work::Run { dashboard };
    }

    /// Makes signals end the program again, with a line that says how to resume the run in
    /// `folder`.
    pub(crate) fn end(&self, folder: &Path) {
        let mut state = self.state();
        state.work = Work::None;
        state.afterwards = Some(format!("ended; go on with kv-train resume {}", folder.display()));
    }

    /// Makes signals only set [`asked`](Self::asked), for the writer of a file.
    pub(crate) fn begin_file(&self) {
        self.state().work = Work::File;
    }

    /// Makes a signal that ends the program remove what it leaves in a `folder` that this program
    /// makes.
    pub(crate) fn making(&self, folder: &Path) {
        self.state().making = Some(folder.into());
    }

    /// Makes signals leave the folder that was made.
    pub(crate) fn made(&self) {
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
                    let line = "stopping as soon as there is a checkpoint; a second time, at once";
                    let _ = writeln!(io::stdout(), "{line}");
                }
            }
            _ => {
                restore_terminal();
                if let Some(folder) = &state.making {
                    staged::remove_unfinished(folder);
                    // It stays where it holds anything else.
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
