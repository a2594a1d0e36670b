use anyhow::Result;

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

/// Calls a function of a target with the autodiff target of the chosen backend.
macro_rules! on_backend {
    ($backend:expr, $function:ident($($argument:expr),*)) => {
        match $backend {
            #[cfg(feature = "flex")]
            $crate::backend::Backend::Flex => {
                $function::<kv_models::kv_cubecl::Autodiff<kv_models::kv_cubecl::Flex>>($($argument),*)
            }
            #[cfg(feature = "wgpu")]
            $crate::backend::Backend::Wgpu => {
                $function::<kv_models::kv_cubecl::Autodiff<kv_models::kv_cubecl::Wgpu>>($($argument),*)
            }
            #[cfg(feature = "cuda")]
            $crate::backend::Backend::Cuda => {
                $function::<kv_models::kv_cubecl::Autodiff<kv_models::kv_cubecl::Cuda>>($($argument),*)
            }
            #[allow(unreachable_patterns, reason = "with every backend built in")]
            other => $crate::backend::not_built_in(other),
        }
    };
}
pub(crate) use on_backend;

#[allow(dead_code, reason = "unused with every backend built in")]
pub(crate) fn not_built_in(backend: Backend) -> Result<()> {
    let name = format!("{backend:?}").to_lowercase();
    anyhow::bail!(
        "backend {name} is not built into this kv-train: build it with --features {name}"
    )
}
