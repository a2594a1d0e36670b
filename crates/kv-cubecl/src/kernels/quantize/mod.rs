//! Restoring packed tensors, quantize-then-restore in place, and its gradient.
//!
//! Quantizing itself is [`super::cache::launch_flush_keys`] and its twin for values, from an empty
//! window.

mod kernel;
mod launch;
#[cfg(all(test, feature = "cuda-ptx"))]
mod tests;

pub(crate) use launch::{
    RestoreProblem, launch_dequantize_keys, launch_dequantize_values, launch_fake_quantize_keys,
    launch_fake_quantize_values, launch_round_trip, launch_scale_gradient_keys,
    launch_scale_gradient_values,
};
