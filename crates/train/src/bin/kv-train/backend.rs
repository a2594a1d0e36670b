/// Where to train.
#[derive(Clone, Copy, Debug, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Backend {
    /// This machine's processor.
    Flex,
    /// A graphics card through WebGPU.
    Wgpu,
    /// An NVIDIA card.
    Cuda,
}

/// Calls a function of a target for the chosen backend, a target of which `$wrap` makes.
macro_rules! dispatch {
    ($backend:expr, $wrap:ident, $function:ident($($argument:expr),*)) => {
        match $backend {
            #[cfg(feature = "flex")]
            $crate::backend::Backend::Flex => {
                $function::<$crate::backend::$wrap<kv_models::kv_cubecl::Flex>>($($argument),*)
            }
            #[cfg(feature = "wgpu")]
            $crate::backend::Backend::Wgpu => {
                $function::<$crate::backend::$wrap<kv_models::kv_cubecl::Wgpu>>($($argument),*)
            }
            #[cfg(feature = "cuda")]
            $crate::backend::Backend::Cuda => {
                $function::<$crate::backend::$wrap<kv_models::kv_cubecl::Cuda>>($($argument),*)
            }
            #[allow(unreachable_patterns, reason = "with every backend built in")]
            other => Err($crate::backend::not_built_in(other)),
        }
    };
}
pub(crate) use dispatch;

/// A target as it is.
pub(crate) type Plain<T> = T;
pub(crate) use kv_models::kv_cubecl::Autodiff;

#[allow(dead_code, reason = "unused with every backend built in")]
pub(crate) fn not_built_in(backend: Backend) -> anyhow::Error {
    let name = format!("{backend:?}").to_lowercase();
    anyhow::anyhow!(
        "backend {name} is not built into this kv-train: build it with --features {name}"
    )
}
