use indicatif::{ProgressBar, ProgressStyle};

/// Creates a progress bar of `total` tokens with a message. It is drawn only if standard error is a
/// terminal.
pub fn token_bar(total: usize) -> ProgressBar {
    bar(total, "{bar:20} {pos}/{len} tokens, {eta} left  {wide_msg}")
}

/// Creates a progress bar of a model's `total` bytes. It is drawn only if standard error is a
/// terminal.
pub fn load_bar(total: usize) -> ProgressBar {
    bar(total, "{bar:20} {decimal_bytes}/{decimal_total_bytes} loaded, {eta} left")
}

/// Creates a progress bar of a number of parts, which is set later. It is drawn only if standard
/// error is a terminal.
pub fn count_bar() -> ProgressBar {
    bar(0, "{bar:20} {pos}/{len}, {eta} left")
}

fn bar(total: usize, style: &str) -> ProgressBar {
    let bar = ProgressBar::new(total as u64);
    match ProgressStyle::with_template(style) {
        Ok(style) => bar.with_style(style),
        // The templates above are valid, so this does not happen; the default style would do.
        Err(_) => bar,
    }
}
