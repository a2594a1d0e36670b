//! Writing a cache in place: quantizes tokens that leave the residual and stores new ones.

mod elements;
mod flush;
mod launch;
#[cfg(all(test, feature = "cuda-ptx"))]
mod tests;
mod token;

pub(crate) use launch::{
    CacheBindings, CacheProblem, launch_append, launch_flush, launch_quantize, launch_write_token,
};
