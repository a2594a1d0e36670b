//! How training differentiates and applies the quantizer: [`FakeQuantOptions`].

use serde::{Deserialize, Serialize};

/// Derivative of the quantizer in the backward pass. The true derivative is zero almost everywhere.
/// The forward pass is the same for all variants.
///
/// The formulas are for one group of `x`: `scale`, `min`, `code` and `n` are those of
/// [`quantize`](crate::quantize), `x_hat = code * scale + min`, and `g` is the gradient of the loss
/// with respect to `x_hat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SteGradient {
    /// `dL/dx_i = g_i`: the quantizer is the identity (Bengio et al., 2013,
    /// <https://arxiv.org/abs/1308.3432>).
    #[default]
    Identity,
    /// Only rounding is the identity; scale and minimum depend on the group's extremes (the step
    /// size gradient of LSQ, Esser et al., 2020, <https://arxiv.org/abs/1902.08153>, for a scale
    /// and minimum that are read off the group):
    ///
    /// `dL/dx_i = g_i + (sum_j g_j e_j) * ([i = argmax x] - [i = argmin x]) / n`, where
    /// `e_j = code_j - (x_j - min) / scale` is the rounding error in steps. There is no term for
    /// the minimum: a shift of the whole group moves `min` and `x` alike. Of equal extremes the
    /// first is taken; a group of scale 0 passes `g` unchanged. `e_j` is limited to ±1/2, which it
    /// exceeds only where f16 is too coarse for `min` or `scale`.
    ///
    /// In formats whose scale follows from the norm (`tq2` to `tq4`), with the restored numbers
    /// `y`: `dL/dx_i = g_i + x_i * sum_j g_j (y_j - x_j) / sum_j x_j^2`.
    ScaleMin,
}

/// Options of the quantizer in [`streaming_attention_with`](crate::streaming_attention_with).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FakeQuantOptions {
    /// Derivative that gradients use.
    pub gradient: SteGradient,
    /// Quantize every token, that of the query itself included, instead of only those that have
    /// left the residual window and are not sinks; with per-channel groups an incomplete last group
    /// stays in float. No cache works like this: the option is for comparison.
    pub quantize_everything: bool,
}
