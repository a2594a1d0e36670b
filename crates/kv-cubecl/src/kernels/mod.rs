//! CubeCL kernels, written once for WGPU and CUDA.
//!
//! CubeCL's words: a unit is a thread, a plane a warp or subgroup, a cube a thread block or
//! workgroup.
//!
//! Launch functions take a client and buffer bindings, not Burn tensors. All kernels respect the
//! WebGPU limits: at most 8 storage bindings, 256 units per cube, 16 KiB of shared memory. Codes
//! and parameters are u32 words, so that no u8 or i8 buffer is needed, and f16 buffers only for
//! caches that store f16. Lengths are run-time scalars, so that a growing context compiles a few
//! kernels at most (cubes of a few sizes).
//!
//! Launch functions trust their callers for the lengths of buffers, so they are not public. A
//! launch that needs more cubes or wider indices than the device has is an error before it starts
//! ([`kv_device::grid`]).

#![allow(
    clippy::single_match,
    clippy::collapsible_match,
    reason = "kernels choose by `match` while they are made; CubeCL knows no `if let` for that"
)]

pub(crate) mod cache;
pub(crate) mod chunk_attention;
pub(crate) mod decode_attention;
pub(crate) mod delta;
pub(crate) mod hadamard;
mod head_rows;
mod layout;
pub(crate) mod quantize;
pub(crate) mod rope;
mod row_blocks;
mod scores;
pub(crate) mod shared_attention;
pub(crate) mod sparse;
pub(crate) mod streaming_attention;

use cubecl::client::Client;

#[cfg(all(test, any(feature = "cuda-source", feature = "cuda-ptx")))]
use kv_device::cuda_source;
use kv_device::grid;
use kv_device::grid::ELEMENTWISE_UNITS;
pub(crate) use kv_device::grid::{Grid, Limits};

use crate::Result;

/// Cubes for `n` units of the operation `what` on the client's device; its longest buffer has
/// `elements`.
fn elementwise(client: &Client, what: &str, n: usize, elements: usize) -> Result<Grid> {
    Ok(Grid::elementwise(what, n, elements, &Limits::of(client.properties()))?)
}
