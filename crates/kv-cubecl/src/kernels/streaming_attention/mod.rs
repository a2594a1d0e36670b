//! The closed form: causal attention where each row sees quantized and float keys and values by
//! the window, and its gradients. No score matrix of the whole sequence exists.
//!
//! **Supported**: head_dim up to 256, any number of query heads per kv head, f32.
//!
//! **Rejected**: a head_dim above 256, before anything is launched.

mod backward;
mod kernel;
mod launch;

pub use launch::{
    BackwardBindings, ForwardBindings, StreamProblem, launch_backward, launch_forward,
};
