//! Restoring packed tensors, and fake quantization (quantizing and restoring in place) with its
//! gradient.
//!
//! Quantizing itself is [`super::cache::launch_quantize`].

mod kernel;
mod launch;
#[cfg(all(test, feature = "cuda-ptx"))]
mod tests;

pub(crate) use launch::{
    RestoreProblem, launch_dequantize, launch_fake_quantize, launch_round_trip,
    launch_scale_gradient,
};
