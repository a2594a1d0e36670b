//! CubeCL kernels for WGPU and CUDA.
//!
//! CubeCL's terms: a unit is a thread, a plane is a warp or subgroup, and a cube is a thread block
//! or workgroup.
//!
//! Launch functions take a client and buffer bindings, not Burn tensors. All kernels respect the
//! WebGPU limits: at most 8 storage bindings, 256 units per cube, 16 KiB of shared memory, and
//! buffers of u32 and f32. Shapes are run-time scalars, so one compiled kernel serves every matrix
//! of a format.
//!
//! Launch functions are not public, since they trust their callers for the lengths of buffers. A
//! launch that needs more cubes or wider indices than the device has returns an error before it
//! starts ([`kv_device::grid`]).

pub(crate) mod product;
pub(crate) mod restore;
pub(crate) mod tiled;

use cubecl::client::Client;
#[cfg(all(test, feature = "cuda-source"))]
use kv_device::cuda_source;
use kv_device::grid::{Grid, Limits};

use crate::Result;

/// Returns a grid of at least `cubes` cubes for a kernel that goes by `CUBE_POS`. The kernel counts
/// up to `most` units, elements and bytes of its buffers.
fn grid(client: &Client, what: &str, cubes: usize, units: usize, most: usize) -> Result<Grid> {
    let limits = Limits::of(client.properties());
    Ok(Grid::new(what, [cubes.max(1), 1, 1], units, most, &limits)?)
}

/// Reports the bytes of weights read by a launch of `kernel` to subscribers of
/// [`READ`](crate::READ).
fn report_read(kernel: &'static str, bytes: usize) {
    tracing::trace!(target: crate::READ, kernel, bytes);
}
