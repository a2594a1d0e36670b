//! Ctrl-C during generation: the first stops a text, the next ends the program.

use std::{
    process::exit,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU8, Ordering},
    },
};

use anyhow::Result;
use kv_cli::on_interrupt;

/// The state of the program, which decides the effect of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Phase {
    /// Nothing to keep yet: a signal ends the program.
    Loading,
    /// Generating: a signal stops the text.
    Running,
    /// Waiting for the user's next message: a signal ends the conversation.
    Waiting,
    /// Writing outputs, which is not interrupted.
    Ending,
}

/// Ends a wait for the user.
type Wake = Box<dyn Fn() + Send>;

#[derive(Default)]
struct State {
    phase: AtomicU8,
    /// Signals since the text began.
    signals: AtomicU8,
    wake: Mutex<Option<Wake>>,
}

/// Requests to stop by Ctrl-C or SIGTERM.
#[derive(Clone)]
pub(crate) struct Interrupt(Arc<State>);

impl Interrupt {
    /// Starts to listen to signals. `at_once` is called before the program ends immediately.
    pub(crate) fn listen(at_once: impl Fn() + Send + 'static) -> Result<Self> {
        let interrupt = Self(Arc::default());
        let heard = interrupt.clone();
        on_interrupt(move || heard.signalled(&at_once))?;
        Ok(interrupt)
    }

    /// Starts the phase in which a signal stops the text.
    pub(crate) fn begin(&self) {
        self.0.signals.store(0, Ordering::SeqCst);
        self.set(Phase::Running);
    }

    pub(crate) fn stops(&self) -> bool {
        self.0.signals.load(Ordering::SeqCst) > 0
    }

    pub(crate) fn ends(&self) -> bool {
        self.0.signals.load(Ordering::SeqCst) > 1
    }

    /// Starts to wait for the user's first message; `wake` ends the wait.
    pub(crate) fn wait(&self, wake: impl Fn() + Send + 'static) {
        *self.0.wake.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(wake));
        self.pause();
    }

    /// Starts to wait for the user's next message.
    pub(crate) fn pause(&self) {
        self.set(Phase::Waiting);
    }

    /// Starts the phase that is not interrupted.
    pub(crate) fn finish(&self) {
        self.set(Phase::Ending);
    }

    fn set(&self, phase: Phase) {
        self.0.phase.store(phase as u8, Ordering::SeqCst);
    }

    fn signalled(&self, at_once: &impl Fn()) {
        let phase = self.0.phase.load(Ordering::SeqCst);
        if phase == Phase::Loading as u8 {
            at_once();
            exit(kv_cli::INTERRUPTED.into());
        }
        if phase == Phase::Waiting as u8 {
            self.0.signals.store(2, Ordering::SeqCst);
            if let Some(wake) = &*self.0.wake.lock().unwrap_or_else(PoisonError::into_inner) {
                wake();
            }
            return;
        }
        let signals = self.0.signals.load(Ordering::SeqCst).saturating_add(1);
        self.0.signals.store(signals, Ordering::SeqCst);
        if phase == Phase::Running as u8 && signals > 2 {
            at_once();
            exit(kv_cli::INTERRUPTED.into());
        }
    }
}
