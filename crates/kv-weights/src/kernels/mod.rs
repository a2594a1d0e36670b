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
//! starts ([`grid`]).

// Shared with the tests of kv-cubecl by path, since neither crate depends on the other.
#[cfg(all(test, feature = "cuda-source"))]
#[path = "../../../kv-cubecl/src/kernels/cuda_source/mod.rs"]
#[allow(unexpected_cfgs, reason = "kv-cubecl has a feature more, for PTX")]
mod cuda_source;
mod grid;
pub(crate) mod product;
pub(crate) mod restore;
pub(crate) mod tiled;

pub(crate) use grid::Grid;

/// Reports the bytes of weights read by a launch of `kernel` to subscribers of
/// [`READ`](crate::READ).
fn report_read(kernel: &'static str, bytes: usize) {
    tracing::trace!(target: crate::READ, kernel, bytes);
}
