//! [`streaming_attention`](crate::streaming_attention), the closed form of the cache: causal
//! attention of a whole sequence, where each row sees quantized and float keys and values by the
//! window, and its gradients. The score matrix of the whole sequence is never stored.
//!
//! The forward pass blocks its products in registers; a head_dim that is not a multiple of 4 has a
//! simpler kernel.
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
