//! Implementations of `WeightOps` for Burn's backends.

#[cfg(feature = "autodiff")]
mod autodiff;
pub(crate) mod composed;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "remote")]
pub(crate) mod remote;

use burn::tensor::Device;
use kv_device::Backends;

use crate::{Error, Result};

const BACKENDS: Backends = Backends {
    crate_name: "kv-weights",
    flex: cfg!(feature = "flex"),
    cube: cfg!(feature = "cube"),
    autodiff: cfg!(feature = "autodiff"),
    remote: cfg!(feature = "remote"),
};

/// Checks that packed weights can be multiplied on `device`.
///
/// The device must belong to a backend enabled by this crate's features. Burn may have been built
/// with other backends as well.
///
/// # Errors
/// [`Error::Unsupported`] naming `op`.
pub fn check_device(op: &str, device: &Device) -> Result<()> {
    Ok(BACKENDS.check(op, device)?)
}

/// Returns the size in bytes of the largest buffer that kernels on `device` can use, or `None` if
/// only memory limits it. The limits are those of allocations and of index types.
#[allow(unused_variables, reason = "without a CubeCL backend there is no limit")]
pub fn largest_buffer(device: &Device) -> Option<u64> {
    #[cfg(feature = "cube")]
    if let Some(client) = kv_device::client(device) {
        use burn_cubecl::cubecl::ir::AddressType;
        let properties = client.properties();
        let wide = properties.supports_address(AddressType::U64);
        let counted = if wide { u64::MAX } else { u32::MAX.into() };
        return Some(properties.memory.max_page_size.min(counted));
    }
    None
}
/// Checks that kernels on `device` can use a buffer of `bytes`, which holds `what`.
///
/// # Errors
/// [`Error::Unsupported`] naming `what` and the limit.
pub(crate) fn check_bytes(
    what: impl FnOnce() -> String,
    bytes: usize,
    device: &Device,
) -> Result<()> {
    /// Size supported by every device: the minimum that WebGPU guarantees.
    const EVERYWHERE: usize = 128 << 20;
    if bytes <= EVERYWHERE {
        return Ok(());
    }
    within(what, bytes, largest_buffer(device))
}

/// Checks `bytes` against a device's largest buffer.
fn within(what: impl FnOnce() -> String, bytes: usize, largest: Option<u64>) -> Result<()> {
    let Some(most) = largest.filter(|&most| bytes as u64 > most) else { return Ok(()) };
    let why = format!(
        "it needs {bytes} bytes, but a buffer of the device holds at most {most}; split its rows"
    );
    Err(Error::Unsupported { what: what(), why })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_beyond_the_limit_are_rejected() {
        let what = || "a matrix [262144, 2304] of q6_k".to_string();
        // The binding size that WebGPU guarantees.
        let limit = Some(128 << 20);
        assert!(within(what, 128 << 20, limit).is_ok());
        let message = within(what, 495_452_160, limit).unwrap_err().to_string();
        assert_eq!(
            message,
            "a matrix [262144, 2304] of q6_k is not supported: it needs 495452160 bytes, but a \
             buffer of the device holds at most 134217728; split its rows"
        );
        assert!(within(what, 1 << 40, None).is_ok());
    }
}
