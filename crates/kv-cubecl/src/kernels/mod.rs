//! CubeCL kernels, written once for WGPU and CUDA.
//!
//! They know a client and bindings, never a Burn tensor. All respect the WebGPU limits: at most 8
//! storage bindings, 256 units per cube, 16 KiB of shared memory; codes and parameters are u32
//! words, so that no f16, u8 or i8 buffer is needed; lengths are run-time scalars, so that nothing
//! is recompiled as the context grows.

pub mod cache;
pub mod chunk_attention;
mod codec;
#[cfg(all(test, any(feature = "cuda-source", feature = "cuda-ptx")))]
mod cuda_source;
pub mod decode_attention;
pub mod quantize;
mod row_blocks;
pub mod streaming_attention;
mod window;

use cubecl::prelude::*;

/// Units per cube of the element-wise kernels.
const ELEMENTWISE_UNITS: u32 = 128;

/// Largest number of cubes along one axis that WebGPU guarantees.
const MAX_CUBES: u32 = 65_535;

/// Covers `n` independent units of work.
fn elementwise(n: usize) -> (CubeCount, CubeDim) {
    let cubes = (n as u32).div_ceil(ELEMENTWISE_UNITS).max(1);
    let count = match cubes <= MAX_CUBES {
        true => CubeCount::Static(cubes, 1, 1),
        false => CubeCount::Static(MAX_CUBES, cubes.div_ceil(MAX_CUBES), 1),
    };
    (count, CubeDim::new_1d(ELEMENTWISE_UNITS))
}
