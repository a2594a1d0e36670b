//! `KvCacheOps` for each of Burn's backends.

#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use burn::tensor::Device;

use crate::{Result, layout::CacheLayout};

/// Whether the backend of `device` can serve a cache of `layout`.
#[allow(unused_variables, reason = "without a CubeCL backend there is nothing to refuse")]
pub(crate) fn check(layout: &CacheLayout, device: &Device) -> Result<()> {
    #[cfg(feature = "cube")]
    if let burn::backend::DispatchDevice::Cube(_) = device.clone().without_autodiff().as_dispatch()
    {
        return crate::kernels::decode_attention::check(layout);
    }
    Ok(())
}
