//! burn-train's dashboard, on a terminal whose Ctrl-C still is a signal.

use std::{any::Any, io};

use burn_train::{Interrupter, renderer::tui::TuiMetricsRendererWrapper};
use crossterm::{
    cursor::Show,
    event::DisableMouseCapture,
    execute,
    terminal::{LeaveAlternateScreen, disable_raw_mode, is_raw_mode_enabled},
};

/// The dashboard; `resumed` is the epoch a run continues after.
pub(crate) fn new(interrupter: Interrupter, resumed: Option<usize>) -> TuiMetricsRendererWrapper {
    let dashboard = TuiMetricsRendererWrapper::new(interrupter, resumed);
    #[cfg(unix)]
    keep_interrupts();
    dashboard
}

/// The dashboard reads keys in raw mode, in which a terminal passes Ctrl-C on as a key, and the
/// dashboard ignores it.
#[cfg(unix)]
fn keep_interrupts() {
    use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, tcgetattr, tcsetattr};

    /// What no key sends.
    const NONE: u8 = if cfg!(target_os = "linux") { 0 } else { 0xff };
    // A thread of the dashboard's switches the mode.
    for _ in 0..200 {
        let Ok(mut mode) = tcgetattr(io::stdin()) else { return };
        let raw = is_raw_mode_enabled().unwrap_or(false);
        if raw && !mode.local_modes.contains(LocalModes::ICANON) {
            mode.local_modes |= LocalModes::ISIG;
            // To suspend the program here would leave the terminal raw.
            for key in [SpecialCodeIndex::VSUSP, SpecialCodeIndex::VQUIT] {
                mode.special_codes[key] = NONE;
            }
            // Where this fails, `q` and `s` still stop the run.
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &mode);
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Gives the terminal back where a program ends at once, if the dashboard has it.
pub fn restore_terminal() {
    if is_raw_mode_enabled().unwrap_or(false) {
        // Nothing can be done for a terminal that cannot be written.
        let _ = disable_raw_mode();
        let _ = execute!(io::stdout(), DisableMouseCapture, LeaveAlternateScreen, Show);
    }
}

/// Whether a panic is the dashboard's way to stop immediately; it has left the screen then.
pub(crate) fn is_kill(panic: &(dyn Any + Send)) -> bool {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let kill = text.is_some_and(|text| text == "Killing training from user input.");
    if kill {
        let _ = execute!(io::stdout(), Show);
    }
    kill
}
