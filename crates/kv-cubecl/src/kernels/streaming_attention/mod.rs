//! The closed form: causal attention where each row sees quantized and float keys and values by
//! the window, and its gradients. No score matrix of the whole sequence exists.
//!
//! Forward, products are blocked in registers; a head_dim that is not a multiple of 4 has a simpler kernel.
//!
//! **Supported**: head_dim up to 256, any number of query heads per kv head, f32.
//!
//! **Rejected**: a head_dim above 256, before anything is launched.

mod backward;
mod forward;
mod kernel;
mod launch;
#[cfg(all(test, feature = "cuda-ptx"))]
mod tests;

pub(crate) use launch::{
    BackwardBindings, ForwardBindings, StreamProblem, launch_backward, launch_forward,
};
