//! The kind and the memory of a device.

use std::fmt;

use burn::tensor::Device;
#[cfg(feature = "flex")]
use kv_cubecl::Target;
use serde::Serialize;

use crate::shortage::decimal_size;

/// The memory that a command used on a device, and the plan made for it, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceUse {
    /// The most that the device's allocator reserved at the end of a phase: loading, a text, a
    /// benchmark. The allocator keeps what a phase has freed.
    pub peak_bytes: u64,
    /// Weights, caches and activations, as planned before the model was loaded; `None` without a
    /// plan.
    pub planned_bytes: Option<u64>,
}

impl DeviceUse {
    /// Reads the memory that the allocator of `device` reserves now; `None` on the CPU.
    pub fn now(device: &Device) -> Option<Self> {
        let usage = device.memory_pool_usage()?;
        Some(Self { peak_bytes: usage.bytes_reserved, planned_bytes: None })
    }
}

/// Returns whether `device` is the CPU, without autodiff.
pub(crate) fn is_cpu(device: &Device) -> bool {
    #[cfg(feature = "flex")]
    let is_cpu = kv_cubecl::Flex::hosts(device);
    #[cfg(not(feature = "flex"))]
    let is_cpu = {
        let _ = device;
        false
    };
    is_cpu
}

impl fmt::Display for DeviceUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "peak {}", decimal_size(self.peak_bytes))?;
        match self.planned_bytes {
            Some(planned) => write!(f, ", planned {}", decimal_size(planned)),
            None => Ok(()),
        }
    }
}
