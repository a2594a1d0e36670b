//! Decode attention: a few query rows over a cache, in one fused pass over its codes.
//!
//! The tokens are split over cubes. Each cube serves the query rows of one kv head, so that packed
//! words are read once for all of them, and writes a partial softmax per row: `o`, the weighted sum
//! of values, `m`, the largest score, and `l`, the sum of weights. A second kernel merges them. The
//! history is never restored in memory: scales and minima are folded into the query once per group
//! of keys, or into sums over the codes of a token. If keys are stored after the Hadamard
//! transform, every cube transforms its query rows; if values are, the last kernel undoes it in the
//! output.
//!
//! **Supported**: head_dim up to 256; any number of query heads per kv head and of query rows;
//! every format or float on either side; f32 and f16 float rows.
//!
//! **Rejected** ([`Error::Unsupported`](crate::Error::Unsupported)): a head_dim above 256, and
//! sizes for which the device has too few cubes or too narrow indices.

mod args;
mod base;
mod kernel;
mod launch;
mod rows;
mod score;
#[cfg(all(test, any(feature = "cuda-source", feature = "cuda-ptx")))]
mod tests;
mod tiles;
mod values;

pub(crate) use args::{CacheBuffers, CacheBuffersLaunch, DecodeArgs, args};
#[cfg(all(test, any(feature = "cuda-source", feature = "cuda-ptx")))]
pub(crate) use args::{CacheBuffersCompilationArg, compilation_args};
pub(crate) use base::{DecodeProblem, Hardware, MAX_HEAD_DIM, SHARED_BYTES, check, splits};

pub(crate) use launch::{DecodeBindings, launch_ref};
pub(crate) use launch::{check_size, grid, launch_merge, partial_results};
pub(crate) use score::word_at;
pub(crate) use tiles::{LOWEST, lengths_of, weight_of};
pub(crate) use values::value_address;

/// Kernels always multiply weights with it, so values below 2^-102 lose digits.
pub(crate) use crate::scores::DOWN;
