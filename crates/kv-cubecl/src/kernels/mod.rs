//! CubeCL kernels, written once for WGPU and CUDA.
//!
//! They know a client and bindings, never a Burn tensor. All respect the WebGPU limits: at most 8
//! storage bindings, 256 units per cube, 16 KiB of shared memory; codes and parameters are u32
//! words, so that no f16, u8 or i8 buffer is needed; lengths are run-time scalars, so that nothing
//! is recompiled as the context grows.
//!
//! Launch functions trust their callers for the lengths of buffers, so that they are not public. What a
//! device cannot count, cubes or elements, is an error before the launch ([`grid`]).

pub(crate) mod cache;
pub(crate) mod chunk_attention;
mod codec;
#[cfg(all(test, any(feature = "cuda-source", feature = "cuda-ptx")))]
mod cuda_source;
pub(crate) mod decode_attention;
mod grid;
mod layout;
pub(crate) mod quantize;
mod row_blocks;
pub(crate) mod streaming_attention;

use cubecl::client::Client;

use crate::Result;
#[cfg(all(test, feature = "cuda-ptx"))]
use grid::ELEMENTWISE_UNITS;
pub(crate) use grid::{Grid, Limits};

/// Cubes for `n` units of the operation `what` on the client's device; `elements` are those of its longest
/// buffer.
fn elementwise(client: &Client, what: &str, n: usize, elements: usize) -> Result<Grid> {
    Grid::elementwise(what, n, elements, &Limits::of(client.properties()))
}
