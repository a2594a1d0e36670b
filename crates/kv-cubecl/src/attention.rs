//! What all attention of this crate takes and returns.

use burn::tensor::Tensor;

use crate::{Result, error::invalid, scores::Scores};

/// Options of the softmax over attention scores.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "remote", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct AttentionOptions {
    /// Factor on the scores; `None` for `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Bound on the scaled scores: `softcap * tanh(score / softcap)`, as in Gemma 2 (2024,
    /// <https://arxiv.org/abs/2408.00118>); `None` for no bound.
    pub softcap: Option<f32>,
}

impl AttentionOptions {
    /// Sets the factor on the scores.
    #[must_use]
    pub const fn with_scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Sets the bound on the scaled scores.
    #[must_use]
    pub const fn with_softcap(mut self, softcap: f32) -> Self {
        self.softcap = Some(softcap);
        self
    }

    /// Checks the numbers.
    ///
    /// # Errors
    /// [`InvalidConfig`](crate::Error::InvalidConfig) naming the field, its value and the rule.
    pub fn validate(&self) -> Result<()> {
        for (field, number) in [("scale", self.scale), ("softcap", self.softcap)] {
            if let Some(number) = number.filter(|x| !x.is_finite() || *x <= 0.0) {
                return Err(invalid(field, number, "must be finite and above 0"));
            }
        }
        Ok(())
    }

    /// Returns the scale and the soft cap for queries and keys of `head_dim` channels.
    pub(crate) fn scores(&self, head_dim: usize) -> Scores {
        let scale = self.scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt());
        Scores { scale, softcap: self.softcap }
    }
}

/// Attention of some query rows over what each of them sees.
#[derive(Clone, Debug)]
pub struct Attention {
    /// `softmax(scores) value`, in the shape of the query, with the channels of a value.
    pub output: Tensor<4>,
    /// The log-sum-exp of each row's scaled scores, `[batch, n_heads, tokens]`. With it attention
    /// over other tokens, or a sink that brings no value, can be merged; it records no gradient.
    pub lse: Tensor<3>,
}
