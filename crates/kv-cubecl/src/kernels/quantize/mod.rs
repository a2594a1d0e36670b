//! Restoring packed tensors, fake quantization (quantizing and restoring in place) and its
//! gradient.
//!
//! Quantizing into packed tensors is in [`super::cache`]: a flush of the whole tensor.

mod kernel;
mod launch;
#[cfg(all(test, feature = "cuda-ptx"))]
mod tests;

pub(crate) use launch::{
    RestoreProblem, launch_dequantize_keys, launch_dequantize_values, launch_fake_quantize_keys,
    launch_fake_quantize_values, launch_round_trip, launch_scale_gradient_keys,
    launch_scale_gradient_values,
};
