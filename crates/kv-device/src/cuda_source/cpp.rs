//! The CUDA C++ that CubeCL writes for a kernel.

use std::collections::HashSet;

use cubecl::{Compiler, prelude::*};
use cubecl_cpp::{
    shared::{CompilationOptions, CppCompiler, CppSupportedFeatures},
    target::Cuda,
};

use super::leave;

/// CUDA C++ of `kernel` for compute capability 9.0, also written to `name`.cu in the folder
/// that `KV_CUDA_SOURCE` names, if set.
pub fn cuda_source(name: &str, kernel: &dyn CubeKernel) -> String {
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
    leave(&format!("{name}.cu"), &source);
    source
}

/// Statements that index a local array by anything but a literal. The compiler cannot keep such an
/// array in registers.
pub fn dynamic_indices(source: &str) -> Vec<&str> {
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
