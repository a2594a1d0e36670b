//! [`Drafter`]: what guesses tokens.

use std::fmt;

use super::pace::Pace;
use crate::error::Result;

/// Guesses the tokens of one text.
pub(in crate::generate) trait Drafter: fmt::Debug + Send {
    /// Adds a token to the text.
    fn push(&mut self, id: u32);

    /// Returns at most `most` guesses of the next tokens; none if they would not pay in a pass of
    /// `pace`.
    ///
    /// # Errors
    /// Fails as a model does.
    fn draft(&mut self, most: usize, pace: Pace) -> Result<Vec<u32>>;
}
