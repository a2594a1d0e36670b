use indicatif::{ProgressBar, ProgressStyle};

/// A bar on standard error that counts `total` tokens and says how long the rest takes, with a
/// message behind it. Nothing is drawn where standard error is no terminal.
pub fn token_bar(total: usize) -> ProgressBar {
    const STYLE: &str = "{bar:20} {pos}/{len} tokens, {eta} left  {wide_msg}";
    let bar = ProgressBar::new(total as u64);
    match ProgressStyle::with_template(STYLE) {
        Ok(style) => bar.with_style(style),
        // The template above is valid, so this does not happen; the default style would do.
        Err(_) => bar,
    }
}
