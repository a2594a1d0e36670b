//! The CUDA C++ that CubeCL writes for a kernel, without a GPU: what tests can search.

use std::{collections::HashSet, path::Path, sync::Arc};

use cubecl::{
    Compiler,
    ir::{
        DeviceIdentity, HardwareProperties, MemoryDeviceProperties, OpaqueType, PciVendor,
        PhysicalDevice, VectorSize, features::Plane,
    },
    prelude::*,
    profile::TimingMethod,
};
use cubecl_cpp::{
    register_supported_types,
    shared::{CompilationOptions, CppCompiler, CppSupportedFeatures},
    target::Cuda,
};

/// Properties of an H200, as the CUDA runtime of CubeCL 0.11.3 would fill them in.
pub(super) fn h200() -> Arc<DeviceProperties> {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: 227 * 1024,
        max_cube_count: (i32::MAX as u32, 65_535, 65_535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(132),
        num_cpu_cores: None,
        last_level_cache_size: None,
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let bytes = 141u64 << 30;
    let memory = MemoryDeviceProperties::new(bytes / 4, 512).with_max_memory(bytes);
    let mut physical = PhysicalDevice::default();
    physical.vendor = Some(PciVendor::Nvidia);
    let identity = DeviceIdentity {
        name: "NVIDIA H200".to_owned(),
        fingerprint: "ptx_sm90".to_owned(),
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
    features.cube_cluster = true;
    Arc::new(properties)
}

/// Settings of a launch of cubes of `units`: `mode` is `Checked` for `launch`, `Unchecked` for
/// `launch_unchecked`.
pub(super) fn settings(units: usize, mode: ExecutionMode) -> KernelSettings {
    KernelSettings::new(CubeDim::new_1d(units as u32).into(), mode, AddressType::U32)
}

/// A buffer that is no alias of another.
pub(super) fn buffer() -> BufferCompilationArg {
    BufferCompilationArg { inplace: None }
}

/// Source of `kernel` for compute capability 9.0, also left in the folder that `KV_CUDA_SOURCE` names,
/// if it is set, for `scripts/inspect-cuda`.
pub(super) fn cuda_source(name: &str, kernel: &dyn CubeKernel) -> String {
    let options = CompilationOptions {
        warp_size: 32,
        supports_features: CppSupportedFeatures {
            grid_constants: true,
            clusters: true,
            fast_math: true,
            fast_tanh: true,
            elect_sync: true,
            dp4a: true,
        },
        amd_wmma: None,
    };
    let definition = define_kernel(kernel).unwrap();
    let source = CppCompiler::<Cuda>::default().compile(definition, &options).unwrap().source;
    if let Some(folder) = std::env::var_os("KV_CUDA_SOURCE") {
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(Path::new(&folder).join(name).with_extension("cu"), &source).unwrap();
    }
    source
}

/// Statements that index an array in local memory by anything but a literal, which keeps the array
/// from being registers.
pub(super) fn dynamic_indices(source: &str) -> Vec<&str> {
    let mut arrays = HashSet::new();
    let mut literals = HashSet::new();
    for statement in source.split(';') {
        // `array<float, 4> * v7 = &v7_store`
        if let Some((declared, _)) = statement.split_once("_store")
            && declared.contains("array<")
        {
            arrays.extend(declared.rsplit(['&', ' ']).next());
        }
        // `uint32_t const v8 = 3`
        if let Some((name, value)) = statement.rsplit_once(" = ")
            && value.bytes().all(|byte| byte.is_ascii_digit())
        {
            literals.extend(name.rsplit(' ').next());
        }
    }
    source
        .split(';')
        .filter(|statement| {
            // `float * const v9 = &(*v7)[v8]`
            let indexed = statement.split_once("&(*").and_then(|(_, rest)| rest.split_once(")["));
            indexed.is_some_and(|(array, index)| {
                let index = index.split(']').next().unwrap_or_default();
                arrays.contains(array) && !literals.contains(index)
            })
        })
        .collect()
}
