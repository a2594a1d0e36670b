//! From a name on the command line to a compile-time target.

use clap::ValueEnum;

/// Where to run.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Backend {
    /// The CPU.
    Flex,
    /// Vulkan, Metal or DirectX 12 through WGPU.
    Wgpu,
    /// NVIDIA CUDA.
    Cuda,
}

/// Calls `$run::<Target>($args)` for the chosen target, or says which feature builds it in.
macro_rules! on_backend {
    ($backend:expr, $run:ident($($arg:expr),*)) => {
        match $backend {
            #[cfg(feature = "flex")]
            $crate::backend::Backend::Flex => $run::<kv_cubecl::Flex>($($arg),*),
            #[cfg(feature = "wgpu")]
            $crate::backend::Backend::Wgpu => $run::<kv_cubecl::Wgpu>($($arg),*),
            #[cfg(feature = "cuda")]
            $crate::backend::Backend::Cuda => $run::<kv_cubecl::Cuda>($($arg),*),
            #[allow(unreachable_patterns, reason = "with every backend built in")]
            other => Err($crate::backend::not_built_in(other)),
        }
    };
}
pub(crate) use on_backend;

/// The error for a backend whose feature is off.
#[allow(dead_code, reason = "unused with every backend built in")]
pub(crate) fn not_built_in(backend: Backend) -> anyhow::Error {
    let name = format!("{backend:?}").to_lowercase();
    anyhow::anyhow!(
        "backend {name} is not built into this kv-eval: build it with --features {name}"
    )
}
