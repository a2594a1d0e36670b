//! What is done to scores.

use cubecl::prelude::*;

/// A score bounded by `cap`: `cap * tanh(score / cap)`.
#[cube]
pub(crate) fn softcap(score: f32, cap: f32) -> f32 {
    // Not by tanh, which is NaN for large numbers on some devices; of exp even infinity will do.
    let e = (f32::new(2.0) * score / cap).exp();
    cap * (f32::new(1.0) - f32::new(2.0) / (e + f32::new(1.0)))
}
