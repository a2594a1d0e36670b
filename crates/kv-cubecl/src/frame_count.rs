//! [`Frames`]: lengths that count frames.

use core::fmt;

use serde::{Deserialize, Serialize};

/// A number of frames, as opposed to tokens.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Frames(pub u64);

impl Frames {
    /// Returns the number of tokens of these frames, saturating at `usize::MAX`.
    pub fn tokens(self, tokens_per_frame: usize) -> usize {
        let frames = usize::try_from(self.0).unwrap_or(usize::MAX);
        frames.saturating_mul(tokens_per_frame)
    }
}

impl fmt::Display for Frames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = if self.0 == 1 { "frame" } else { "frames" };
        write!(f, "{} {unit}", self.0)
    }
}
