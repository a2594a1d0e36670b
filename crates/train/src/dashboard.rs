//! burn-train's dashboard, changed so that Ctrl-C still sends a signal.

use std::{any::Any, io};

use burn_train::{Interrupter, renderer::tui::TuiMetricsRendererWrapper};
use crossterm::{
    cursor::Show,
    event::DisableMouseCapture,
    execute,
    terminal::{LeaveAlternateScreen, disable_raw_mode, is_raw_mode_enabled},
};

/// Creates the dashboard. `resumed` is the epoch after which a run continues.
pub(crate) fn new(interrupter: Interrupter, resumed: Option<usize>) -> TuiMetricsRendererWrapper {
    let dashboard = TuiMetricsRendererWrapper::new(interrupter, resumed);
    #[cfg(unix)]
    keep_interrupts();
    dashboard
}

/// Makes the terminal send a signal for Ctrl-C again. The dashboard reads keys in raw mode, where
/// Ctrl-C is an ordinary key, and ignores that key.
#[cfg(unix)]
fn keep_interrupts() {
    use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, tcgetattr, tcsetattr};

    /// The value that switches a special character off.
    const NONE: u8 = if cfg!(target_os = "linux") { 0 } else { 0xff };
    // Wait until the dashboard's thread has switched to raw mode.
    for _ in 0..200 {
        let Ok(mut mode) = tcgetattr(io::stdin()) else { return };
        let raw = is_raw_mode_enabled().unwrap_or(false);
        if raw && !mode.local_modes.contains(LocalModes::ICANON) {
            mode.local_modes |= LocalModes::ISIG;
            // Suspend and quit would leave the terminal in raw mode, so they are switched off.
            for key in [SpecialCodeIndex::VSUSP, SpecialCodeIndex::VQUIT] {
                mode.special_codes[key] = NONE;
            }
            // If this fails, `q` and `s` still stop the run.
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &mode);
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Restores the terminal if the dashboard is using it, for a program that is about to exit.
pub fn restore_terminal() {
    if is_raw_mode_enabled().unwrap_or(false) {
        // Errors are ignored, because the program is about to exit.
        let _ = disable_raw_mode();
        let _ = execute!(io::stdout(), DisableMouseCapture, LeaveAlternateScreen, Show);
    }
}

/// Returns whether a panic is the one that the dashboard raises to stop immediately. The dashboard
/// has left the alternate screen by then, so this only shows the cursor again.
pub(crate) fn is_kill(panic: &(dyn Any + Send)) -> bool {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let kill = text.is_some_and(|text| text == "Killing training from user input.");
    if kill {
        let _ = execute!(io::stdout(), Show);
    }
    kill
}
