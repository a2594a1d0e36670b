//! Writing a cache in place: quantizes tokens that leave the residual and stores new ones.

mod block_launch;
mod blocks;
mod elements;
mod flush;
mod launch;
mod range;
#[cfg(all(test, feature = "cuda-ptx"))]
mod tests;
mod tile;
mod token;

pub(crate) use block_launch::{
    BlockSource, launch_fake_quantize_blocks, launch_flush_blocks, launch_gradient_blocks,
    launch_quantize_blocks,
};
pub(crate) use launch::{
    CacheBindings, CacheProblem, launch_append, launch_flush, launch_quantize, launch_write_token,
};
