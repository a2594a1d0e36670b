//! The backend that a program runs on, as a command-line argument.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The backend to run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// The CPU.
    Flex,
    /// Vulkan, Metal or DirectX 12 through WGPU.
    Wgpu,
    /// NVIDIA CUDA.
    Cuda,
    /// Devices of workers, which only a list of devices names.
    #[value(skip)]
    Remote,
}

/// The `$wrap` of [`dispatch!`](crate::dispatch) that passes the target on unchanged; the other one
/// in use is `Autodiff`.
pub type Plain<T> = T;

/// Calls `$run::<$wrap<Target>>($args)` for the chosen [`Backend`], or fails with the name of the
/// feature that builds it in.
#[macro_export]
macro_rules! dispatch {
    ($backend:expr, $wrap:ident, $run:ident($($arg:expr),*)) => {
        match $backend {
            #[cfg(feature = "flex")]
            $crate::Backend::Flex => $run::<$wrap<$crate::kv_cubecl::Flex>>($($arg),*),
            #[cfg(feature = "wgpu")]
            $crate::Backend::Wgpu => $run::<$wrap<$crate::kv_cubecl::Wgpu>>($($arg),*),
            #[cfg(feature = "cuda")]
            $crate::Backend::Cuda => $run::<$wrap<$crate::kv_cubecl::Cuda>>($($arg),*),
            #[cfg(feature = "remote")]
            $crate::Backend::Remote => $run::<$wrap<$crate::kv_cubecl::Remote>>($($arg),*),
            #[allow(unreachable_patterns, reason = "with every backend built in")]
            other => Err($crate::not_built_in(other, env!("CARGO_BIN_NAME"))),
        }
    };
}

/// The error for a backend whose feature is off in `program`.
pub fn not_built_in(backend: Backend, program: &str) -> anyhow::Error {
    let name = format!("{backend:?}").to_lowercase();
    anyhow::anyhow!(
        "backend {name} is not built into this {program}: build it with --features {name}"
    )
}
