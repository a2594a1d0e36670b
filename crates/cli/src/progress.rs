use indicatif::{ProgressBar, ProgressStyle};

/// A bar on standard error that counts `total` tokens and says how long the rest takes, with a
/// message behind it. Nothing is drawn where standard error is no terminal.
pub fn token_bar(total: usize) -> ProgressBar {
    bar(total, "{bar:20} {pos}/{len} tokens, {eta} left  {wide_msg}")
}

/// A bar on standard error that counts the `total` bytes of a model and says how long the rest
/// takes. Nothing is drawn where standard error is no terminal.
pub fn load_bar(total: usize) -> ProgressBar {
    bar(total, "{bar:20} {decimal_bytes}/{decimal_total_bytes} loaded, {eta} left")
}

/// A bar on standard error that counts windows of a text, whose number is set later, and says how
/// long the rest takes. Nothing is drawn where standard error is no terminal.
pub fn window_bar() -> ProgressBar {
    bar(0, "{bar:20} {pos}/{len} windows, {eta} left")
}

fn bar(total: usize, style: &str) -> ProgressBar {
    let bar = ProgressBar::new(total as u64);
    match ProgressStyle::with_template(style) {
        Ok(style) => bar.with_style(style),
        // The templates above are valid, so this does not happen; the default style would do.
        Err(_) => bar,
    }
}
