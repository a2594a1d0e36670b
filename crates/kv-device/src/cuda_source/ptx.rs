//! The PTX that CubeCL's CUDA runtime compiles a kernel to through LLVM, as it does by default.

use std::sync::Arc;

use cubecl::{
    Compiler,
    cuda::{CudaCompilationOptions, CudaCompiler, CudaRepresentation},
    ir::nvidia::SmArch,
    prelude::*,
};
use cubecl_llvm::{
    nvptx::ptx_version::PtxVersion,
    shared::lowered_features::{GpuTarget, restrict_features},
};

use super::{card, leave};

/// A kernel and its name.
type Named = (String, Box<dyn CubeKernel>);

/// Names a kernel.
pub fn named(name: impl Into<String>, kernel: impl CubeKernel) -> Named {
    (name.into(), Box::new(kernel))
}

/// Compute capabilities of the cards compiled for, an A100 and an H200.
const ARCHITECTURES: [u32; 2] = [80, 90];

/// The driver whose PTX version is generated: that of CUDA 13.0.
const DRIVER: i32 = 13_000;

/// Properties of the card of this compute capability, as the runtime narrows them for LLVM.
pub fn properties(architecture: u32) -> Arc<DeviceProperties> {
    let mut properties = card(architecture);
    restrict_features(&mut properties, GpuTarget::Nvptx);
    Arc::new(properties)
}

/// PTX of `kernel`, also written to `name`.ARCHITECTURE.ptx in the folder that
/// `KV_CUDA_SOURCE` names, if set.
///
/// Kernels with an exponential need the library of mathematical functions of CUDA's toolkit, in the
/// folder that `CUDA_PATH` names.
pub fn cuda_ptx(name: &str, kernel: &dyn CubeKernel, architecture: u32) -> String {
    let mut options = CudaCompilationOptions {
        arch: Some(SmArch::new(architecture, true)),
        ptx_version: PtxVersion::for_driver(DRIVER),
        ..Default::default()
    };
    options.cpp.supports_features.grid_constants = true;
    let definition = define_kernel(kernel).unwrap();
    let compiled = CudaCompiler::default().compile(definition, &options).unwrap();
    let CudaRepresentation::Llvm(module) = compiled else {
        panic!("CubeCL was built to compile CUDA C++ (feature cuda-cpp)");
    };
    let text = module.ptx.iter().map_while(|&byte| (byte != 0).then_some(byte as u8));
    let text = String::from_utf8(text.collect()).unwrap();
    // Shared memory is reserved by the launch, so the PTX does not say how much there is.
    let shared = module.shared_memory_size;
    leave(
        &format!("{name}.{}.ptx", SmArch::new(architecture, true).target_cpu()),
        &format!("// shared memory: {shared} bytes\n{text}"),
    );
    text
}

/// Compiles the kernels that `kernels` makes for a card, for each card, and asserts that none keeps
/// an array in local memory.
pub fn each_ptx(kernels: impl Fn(Arc<DeviceProperties>) -> Vec<Named>) {
    for architecture in ARCHITECTURES {
        for (name, kernel) in kernels(properties(architecture)) {
            let ptx = cuda_ptx(&name, &*kernel, architecture);
            assert!(!ptx.contains(".local"), "{name} for {architecture}:\n{ptx}");
        }
    }
}
