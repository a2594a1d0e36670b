//! CubeCL kernels, written once for WGPU and CUDA.
//!
//! CubeCL's words: a unit is a thread, a plane a warp or subgroup, a cube a thread block or workgroup.
//!
//! Launch functions take a client and buffer bindings, not Burn tensors. All kernels respect the WebGPU limits: at
//! most 8 storage bindings, 256 units per cube, 16 KiB of shared memory, buffers of u32 and f32. Shapes are run-time
//! scalars, so that a kernel serves every matrix of a format.
//!
//! Launch functions trust their callers for the lengths of buffers, so they are not public. A launch that needs more
//! cubes or wider indices than the device has is an error before it starts ([`grid`]).

// The tests of kv-cubecl have the same use for it, and neither crate has the other in what users build.
#[cfg(all(test, feature = "cuda-source"))]
#[path = "../../../kv-cubecl/src/kernels/cuda_source/mod.rs"]
#[allow(unexpected_cfgs, reason = "kv-cubecl has a feature more, for PTX")]
mod cuda_source;
mod grid;
pub(crate) mod product;
pub(crate) mod restore;
pub(crate) mod tiled;

pub(crate) use grid::Grid;

/// Tells who subscribes to [`READ`](crate::READ) how many bytes of weights a launch of `kernel` reads.
fn tell(kernel: &'static str, bytes: usize) {
    tracing::trace!(target: crate::READ, kernel, bytes);
}
