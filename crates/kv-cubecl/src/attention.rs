//! What all attention of this crate takes and returns.

use burn::tensor::Tensor;

use crate::{Result, error::invalid};

/// How scores become weights.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct AttentionOptions {
    /// What scores are multiplied with; `None` for `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
}

impl AttentionOptions {
    /// Sets what scores are multiplied with.
    #[must_use]
    pub const fn with_scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Checks the numbers.
    ///
    /// # Errors
    /// [`InvalidConfig`](crate::Error::InvalidConfig) naming the field, its value and the rule.
    pub fn validate(&self) -> Result<()> {
        match self.scale {
            Some(scale) if !scale.is_finite() || scale <= 0.0 => {
                Err(invalid("scale", scale, "must be finite and above 0"))
            }
            _ => Ok(()),
        }
    }

    /// The scale where heads have so many channels.
    pub(crate) fn scale(&self, head_dim: usize) -> f32 {
        self.scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt())
    }
}

/// Attention of some query rows over what each of them sees.
#[derive(Clone, Debug)]
pub struct Attention {
    /// `softmax(scores) value`, in the shape of the query, with the channels of a value.
    pub output: Tensor<4>,
    /// The log-sum-exp of each row's scaled scores, `[batch, n_heads, tokens]`. With it attention over other
    /// tokens, or a sink that brings no value, can be merged; it records no gradient.
    pub lse: Tensor<3>,
}
