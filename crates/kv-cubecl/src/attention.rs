//! What all attention of this crate takes and returns.

use burn::tensor::Tensor;

use crate::{Result, error::invalid, scores::Scores};

/// How scores become weights.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct AttentionOptions {
    /// What scores are multiplied with; `None` for `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// What scores are bounded by, after scaling: `softcap * tanh(score / softcap)`, as in Gemma 2
    /// (2024, <https://arxiv.org/abs/2408.00118>); `None` for no bound.
    pub softcap: Option<f32>,
}

impl AttentionOptions {
    /// Sets what scores are multiplied with.
    #[must_use]
    pub const fn with_scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Sets what scores are bounded by.
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

    /// What is done to products of queries and keys of so many channels.
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
