//! Helpers for devices that kv-cubecl, kv-weights and kv-models share: a check that a device has
//! operations, limits of devices on [launches](grid) and buffers, f16 arithmetic for devices
//! without f16, [work in parts](threads) on the CPU, [operations on remote devices](remote), and,
//! for tests, the code of a kernel that NVIDIA's tools compile.
//!
//! The API may change in any release.

#[cfg(any(feature = "cuda-source", feature = "cuda-ptx"))]
pub mod cuda_source;
#[cfg(feature = "cube")]
pub mod grid;
#[cfg(feature = "cube")]
pub mod half;
#[cfg(feature = "remote")]
pub mod remote;
#[cfg(feature = "flex")]
pub mod threads;

use burn::{backend::DispatchDevice, tensor::Device};

/// A combination of inputs, configuration and device that an operation does not support.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} is not supported: {why}")]
pub struct Unsupported {
    /// The thing asked for.
    pub what: String,
    /// The reason.
    pub why: String,
}

/// The backends that a crate's features give its operations.
#[derive(Clone, Copy, Debug)]
pub struct Backends {
    /// The name of the crate.
    pub crate_name: &'static str,
    /// True with feature `flex`.
    pub flex: bool,
    /// True with feature `wgpu` or `cuda`.
    pub cube: bool,
    /// True with feature `autodiff`.
    pub autodiff: bool,
    /// True with feature `remote`.
    pub remote: bool,
}

impl Backends {
    /// Checks that `device` belongs to one of these backends: Burn may have been built with other
    /// backends as well.
    ///
    /// # Errors
    /// [`Unsupported`] naming `op`.
    #[allow(unused_variables, reason = "a build without a backend checks for none")]
    pub fn check(&self, op: &str, device: &Device) -> Result<(), Unsupported> {
        let Self { crate_name, flex, cube, autodiff, remote } = self;
        let unsupported =
            |why: String| Err(Unsupported { what: format!("{op} on {device:?}"), why });
        if !autodiff && device.is_autodiff() {
            return unsupported(format!("{crate_name} was built without its feature autodiff"));
        }
        match device.clone().without_autodiff().as_dispatch() {
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(_) if *cube => Ok(()),
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(_) if *flex => Ok(()),
            #[cfg(feature = "remote")]
            DispatchDevice::Remote(_) if *remote => Ok(()),
            #[cfg(feature = "remote")]
            DispatchDevice::Remote(_) => {
                unsupported(format!("{crate_name} was built without its feature remote"))
            }
            #[allow(
                unreachable_patterns,
                reason = "Burn may have been built with no other backend"
            )]
            _ => unsupported(format!(
                "{crate_name} serves Flex, WGPU, CUDA and remote devices, each if built with its \
                 feature"
            )),
        }
    }
}

/// The memory of a device, where it says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceMemory {
    /// Bytes of the largest buffer; `None` for the CPU.
    pub buffer: Option<u64>,
    /// Bytes of all buffers; `None` for the CPU, and for devices that do not say.
    pub total: Option<u64>,
}

impl DeviceMemory {
    /// Returns the memory of `device`.
    #[allow(unused_variables, reason = "without a CubeCL backend there is nothing to ask")]
    pub fn of(device: &Device) -> Self {
        #[cfg(feature = "cube")]
        if let Some(client) = client(device) {
            let memory = &client.properties().memory;
            return Self { buffer: Some(memory.max_page_size), total: memory.max_memory() };
        }
        Self::default()
    }
}

/// Returns whether `device` belongs to another process or machine, whose limits are not known here.
#[allow(unused_variables, reason = "without the feature there is no such device")]
pub fn is_remote(device: &Device) -> bool {
    #[cfg(feature = "remote")]
    return matches!(device.clone().without_autodiff().as_dispatch(), DispatchDevice::Remote(_));
    #[cfg(not(feature = "remote"))]
    false
}

/// Returns the client of a CubeCL device, `None` on other devices.
#[cfg(feature = "cube")]
pub fn client(device: &Device) -> Option<cubecl::client::Client> {
    match device.clone().without_autodiff().as_dispatch() {
        DispatchDevice::Cube(device) => Some(device.client()),
        #[allow(unreachable_patterns, reason = "CubeCL may be the only backend")]
        _ => None,
    }
}
