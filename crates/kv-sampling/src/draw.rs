//! How a token is picked: [`Draw`].

use crate::{Result, error::invalid};

/// How a token is picked from its logits: with a temperature of 0 the most likely one, the first of equals; else at
/// random among those that pass all filters, by their probabilities.
///
/// Tokens as likely as the last that a filter keeps are kept with it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Divides the logits: below 1 sharpens, above 1 flattens; 0 takes the most likely token.
    pub temperature: f32,
    /// Keeps this many of the most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Of what `top_k` keeps, the smallest set of most likely tokens with at least this share of the probability, the
    /// nucleus of <https://arxiv.org/abs/1904.09751>; 1 keeps all.
    pub top_p: f32,
    /// Keeps the tokens whose probability is at least this share of the most likely one's,
    /// <https://arxiv.org/abs/2407.01082>; 0 keeps all.
    pub min_p: f32,
    /// Equal seeds draw equal tokens at equal positions from equal logits.
    pub seed: u64,
}

impl Draw {
    /// The most likely token; of equals, the first.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 };

    /// Whether the most likely token is always picked.
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
