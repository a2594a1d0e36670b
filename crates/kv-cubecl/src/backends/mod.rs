//! `KvCacheOps` for each of Burn's backends.

#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use burn::tensor::Device;

use crate::{Error, Result, layout::CacheLayout};

/// Whether the backend of `device` has the operations, which are a matter of this crate's features:
/// Burn may have been built with more backends.
pub(crate) fn check_device(op: &str, device: &Device) -> Result<()> {
    let unsupported = |why: &str| {
        Err(Error::Unsupported { what: format!("{op} on {device:?}"), why: why.to_string() })
    };
    if cfg!(not(feature = "autodiff")) && device.is_autodiff() {
        return unsupported("kv-cubecl was built without its feature autodiff");
    }
    match device.clone().without_autodiff().as_dispatch() {
        #[cfg(feature = "cube")]
        burn::backend::DispatchDevice::Cube(_) => Ok(()),
        #[cfg(feature = "flex")]
        burn::backend::DispatchDevice::Flex(_) => Ok(()),
        #[allow(unreachable_patterns, reason = "Burn may have been built with no other backend")]
        _ => unsupported("kv-cubecl serves Flex, WGPU and CUDA, each if built with its feature"),
    }
}

/// Whether the backend of `device` can serve a cache of `layout`.
pub(crate) fn check(op: &str, layout: &CacheLayout, device: &Device) -> Result<()> {
    check_device(op, device)?;
    #[cfg(feature = "cube")]
    if let burn::backend::DispatchDevice::Cube(_) = device.clone().without_autodiff().as_dispatch()
    {
        crate::kernels::decode_attention::check(layout)?;
    }
    // Flex serves every layout.
    let _ = layout;
    Ok(())
}
