//! Writing a cache in place: quantizes tokens that leave the residual and stores new ones.

mod kernel;
mod launch;
#[cfg(all(test, feature = "cuda-ptx"))]
mod tests;

pub(crate) use launch::{
    CacheBindings, CacheProblem, launch_append, launch_flush, launch_quantize, launch_write_token,
};
