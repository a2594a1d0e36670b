//! Settings of sampling: [`Draw`].

use crate::{Result, error::invalid};

/// Settings of sampling. With a temperature of 0, the most likely token is picked, and the first of
/// equals. Otherwise a token that passes all filters is drawn by its probability.
///
/// Tokens as likely as the last one that a filter keeps are kept too.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "remote", derive(serde::Serialize, serde::Deserialize))]
pub struct Draw {
    /// Divides the logits: below 1 sharpens, above 1 flattens; 0 takes the most likely token.
    pub temperature: f32,
    /// Keeps this many of the most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of most likely tokens with at least this share of the probability
    /// that `top_k` leaves, the nucleus of <https://arxiv.org/abs/1904.09751>; 1 keeps all.
    pub top_p: f32,
    /// Keeps the tokens whose probability is at least this share of the most likely one's,
    /// <https://arxiv.org/abs/2407.01082>; 0 keeps all.
    pub min_p: f32,
    /// Equal seeds draw equal tokens at equal positions from equal logits.
    pub seed: u64,
}

impl Draw {
    /// Picks the most likely token; of equals, the first.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 };

    /// Returns whether the most likely token is always picked.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Checks the numbers.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) naming the field.
    pub fn validate(&self) -> Result<()> {
        let Self { temperature, top_p, min_p, .. } = *self;
        if !(temperature.is_finite() && temperature >= 0.0) {
            return Err(invalid("temperature", temperature, "must be finite and at least 0"));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(invalid("top_p", top_p, "must be above 0 and at most 1"));
        }
        if !(0.0..=1.0).contains(&min_p) {
            return Err(invalid("min_p", min_p, "must be from 0 to 1"));
        }
        Ok(())
    }
}
