//! Chunk attention: many query rows over a cache, as when a chunk of a text is prefilled.
//!
//! Inputs and results are those of [`decode_attention`](super::decode_attention). A unit restores a
//! run of tokens, a few channels at a time, and multiplies it with all query rows of its cube
//! before it goes on, so that unpacking costs little beside the products and the restored history
//! is never stored. The scores become weights in shared memory, tile by tile, with a running
//! softmax. Then a unit restores a run of channels of a few tokens and adds it to all rows of the
//! output.
//!
//! **Supported**: 8 query rows per kv head or more, a head_dim that is a multiple of 4 up to 256;
//! bits and float types as decode attention. For everything else [`plan`] returns `None`, and
//! decode attention serves it.

mod base;
mod kernel;
mod launch;
mod restore;
#[cfg(all(test, any(feature = "cuda-source", feature = "cuda-ptx")))]
mod tests;

pub(crate) use base::plan;
pub(crate) use launch::{grid_of, launch_ref};
