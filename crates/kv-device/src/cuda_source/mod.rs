//! The code that NVIDIA's tools get of a kernel, generated without a GPU for tests to search.
//!
//! CubeCL's CUDA runtime compiles a kernel to PTX through LLVM or, on request, writes
//! CUDA C++ for NVIDIA's own compiler.

#![allow(clippy::unwrap_used, reason = "a failing test may panic")]

#[cfg(feature = "cuda-source")]
mod cpp;
#[cfg(feature = "cuda-ptx")]
mod ptx;

use std::path::Path;
#[cfg(feature = "cuda-source")]
use std::sync::Arc;

#[cfg(feature = "cuda-source")]
pub use cpp::{cuda_source, dynamic_indices};
use cubecl::{
    ir::{
        DeviceIdentity, HardwareProperties, MemoryDeviceProperties, OpaqueType, PciVendor,
        PhysicalDevice, VectorSize, features::Plane,
    },
    prelude::*,
    profile::TimingMethod,
};
use cubecl_cpp::register_supported_types;
#[cfg(feature = "cuda-ptx")]
pub use ptx::{cuda_ptx, each_ptx, named, properties};

/// Properties of an H200, as the CUDA runtime of CubeCL 0.11.3 would fill them in.
#[cfg(feature = "cuda-source")]
pub fn h200() -> Arc<DeviceProperties> {
    Arc::new(card(90))
}

/// Properties of a card of this compute capability, 80 for 8.0: an A100 or an H200.
fn card(architecture: u32) -> DeviceProperties {
    let (name, n_multiprocessors, shared_bytes, gigabytes) = match architecture {
        80 => ("NVIDIA A100", 108, 163 * 1024, 80u64),
        90 => ("NVIDIA H200", 132, 227 * 1024, 141),
        other => panic!("no card of compute capability {other}"),
    };
    let bytes = gigabytes << 30;
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: shared_bytes,
        max_cube_count: (i32::MAX as u32, 65_535, 65_535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(n_multiprocessors),
        num_cpu_cores: None,
        last_level_cache_size: None,
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let memory = MemoryDeviceProperties::new(bytes / 4, 512).with_max_memory(bytes);
    let mut physical = PhysicalDevice::default();
    physical.vendor = Some(PciVendor::Nvidia);
    let identity = DeviceIdentity {
        name: name.to_owned(),
        fingerprint: format!("ptx_sm{architecture}"),
        physical: Some(physical),
    };
    let mut properties =
        DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::Device, identity);
    register_supported_types(&mut properties);
    properties.register_opaque_type(OpaqueType::Barrier);
    let features = &mut properties.features;
    for feature in [Plane::Ops, Plane::Sync, Plane::NonUniformControlFlow] {
        features.plane.insert(feature);
    }
    features.memory_reinterpret = true;
    features.alignment = true;
    features.device_memory_scope = true;
    features.copy_async = true;
    features.cube_cluster = architecture >= 90;
    properties
}

/// Settings of a launch of cubes of `units`: `mode` is `Checked` for `launch`, `Unchecked` for
/// `launch_unchecked`.
pub fn settings(units: usize, mode: ExecutionMode) -> KernelSettings {
    KernelSettings::new(CubeDim::new_1d(units as u32).into(), mode, AddressType::U32)
}

/// Compilation argument of a buffer that shares its memory with no other.
pub fn buffer() -> BufferCompilationArg {
    BufferCompilationArg { inplace: None }
}

/// Writes `text` to the folder that `KV_CUDA_SOURCE` names, if set, for `scripts/inspect-cuda`.
fn leave(file: &str, text: &str) {
    if let Some(folder) = std::env::var_os("KV_CUDA_SOURCE") {
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(Path::new(&folder).join(file), text).unwrap();
    }
}
