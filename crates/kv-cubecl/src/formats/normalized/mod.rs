//! Affine codes of tiles whose variances were normalized (KVarN, 2026,
//! <https://arxiv.org/abs/2606.03458>).
//!
//! A tile is `tokens x head_dim` numbers of one head after the Hadamard transform. It is divided by
//! its root mean square, and then by a scale for each token and one for each channel, so that the
//! standard deviations of all tokens and channels become about equal. Keys are then quantized per
//! channel and values per token, in a [range](crate::GroupRange) that may clip outliers.
//!
//! In f16 are stored, for keys, the step and the minimum of each channel times its scale and the
//! root mean square, and the scale of each token; for values, the step and the minimum of each
//! token times its scale, and the scale of each channel times the root mean square. The published
//! method does not divide by the root mean square: its lower bound of the scales then keeps tiles
//! of small numbers, such as most values, as they are.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use super::packed::CodecSpec;

/// The codec of [this module](self).
#[derive(Debug)]
pub(crate) struct Normalized;

impl Normalized {
    pub(super) const SPEC: CodecSpec = CodecSpec {
        parameter_bits: 32,
        largest: None,
        limit: 65504.0,
        float: None,
        scales_by_norm: false,
        needs_hadamard: true,
    };
}

/// The bounds of standard deviations by which scales are multiplied.
pub(crate) const DEVIATIONS: (f32, f32) = (1e-3, 1e3);

/// The bounds of the scales of tokens and channels. The published method bounds their logarithms by
/// -0.3 and 10.
pub(crate) const SCALES: (f32, f32) = (0.740_818_2, 22_026.465);
