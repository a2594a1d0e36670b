//! Decode attention: a few query rows over a cache, in one fused pass over its codes.
//!
//! The tokens are split over cubes; each cube serves the query rows of one kv head, so packed words
//! are read once for all of them, and leaves a partial softmax `(m, l, o)` that a second kernel
//! merges. No dequantized copy of the history exists: scales and minima are folded into the query
//! once per group of keys.
//!
//! **Supported**: head_dim up to 256; any number of query heads per kv head and of query rows; 2, 4
//! and 8 bits or float on either side; f32 and f16 float rows.
//!
//! **Rejected** (returns [`Error::Unsupported`](crate::Error::Unsupported)): a head_dim above 256.

mod args;
mod base;
mod kernel;
mod launch;
mod score;
#[cfg(all(test, any(feature = "cuda-source", feature = "cuda-ptx")))]
mod tests;

pub(crate) use args::{DecodeArgs, args};
pub(crate) use base::{DecodeProblem, Hardware, MAX_HEAD_DIM, SHARED_BYTES, check, splits};
pub(crate) use kernel::{LOWEST, weight_of};
pub(crate) use launch::{DecodeBindings, launch_ref};
pub(crate) use launch::{check_size, grid, launch_merge, partial_results};
