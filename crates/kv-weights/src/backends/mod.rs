//! `WeightOps` for each of Burn's backends.

#[cfg(feature = "autodiff")]
mod autodiff;
pub(crate) mod composed;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use burn::tensor::Device;

#[cfg(feature = "flex")]
pub use flex::in_parts;

use crate::{Error, Result};

/// Checks that weights can be multiplied packed on `device`: that it belongs to a backend that this crate's features
/// give its operations. Burn may have been built with other backends as well.
///
/// # Errors
/// [`Error::Unsupported`] naming `op`.
pub fn check_device(op: &str, device: &Device) -> Result<()> {
    let unsupported = |why: &str| {
        Err(Error::Unsupported { what: format!("{op} on {device:?}"), why: why.to_string() })
    };
    if cfg!(not(feature = "autodiff")) && device.is_autodiff() {
        return unsupported("kv-weights was built without its feature autodiff");
    }
    match device.clone().without_autodiff().as_dispatch() {
        #[cfg(feature = "cube")]
        burn::backend::DispatchDevice::Cube(_) => Ok(()),
        #[cfg(feature = "flex")]
        burn::backend::DispatchDevice::Flex(_) => Ok(()),
        #[allow(unreachable_patterns, reason = "Burn may have been built with no other backend")]
        _ => unsupported(
            "packed weights are multiplied on Flex, WGPU and CUDA, each if built with its feature",
        ),
    }
}
