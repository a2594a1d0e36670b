//! How training treats the quantizer: [`FakeQuantOptions`].

use serde::{Deserialize, Serialize};

/// What the backward pass takes for the derivative of the quantizer, whose own is zero almost
/// everywhere. The forward pass is the same for all.
///
/// Below, over one group of `x`: `scale`, `min`, `code` and `n` of [`quantize`](crate::quantize),
/// `x_hat = code * scale + min`, and `g`, the gradient of the loss with respect to `x_hat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SteGradient {
    /// `dL/dx_i = g_i`: the quantizer is the identity (Bengio et al., 2013,
    /// <https://arxiv.org/abs/1308.3432>).
    #[default]
    Identity,
    /// Only rounding is the identity; scale and minimum depend on the group's extremes (the step size
    /// gradient of LSQ, Esser et al., 2020, <https://arxiv.org/abs/1902.08153>, for a scale and
    /// minimum that are read off the group):
    ///
    /// `dL/dx_i = g_i + (sum_j g_j e_j) * ([i = argmax x] - [i = argmin x]) / n`, where
    /// `e_j = code_j - (x_j - min) / scale` is the rounding error in steps. The minimum adds nothing: a
    /// shift of the group moves `min` and `x` alike. The first of equal extremes is taken; a group of
    /// scale 0 passes `g` unchanged. `e_j` is limited to ±1/2, which it exceeds only where f16 cannot
    /// tell `min` to half a step.
    ScaleMin,
}

/// How [`streaming_attention_with`](crate::streaming_attention_with) treats the quantizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FakeQuantOptions {
    /// How gradients pass the quantizer.
    pub gradient: SteGradient,
    /// Quantize every token, the query's own included, instead of those outside the residual window
    /// and the sinks; with per-channel groups an incomplete last group stays in float. No cache works
    /// like this: it is here to be compared with.
    pub quantize_everything: bool,
}
