//! The device of each backend, or the reason why it is missing.

use burn::tensor::Device;

#[cfg(feature = "flex")]
pub(crate) fn flex() -> Result<Device, String> {
    Ok(Device::flex())
}

#[cfg(feature = "wgpu")]
pub(crate) fn wgpu() -> Result<Device, String> {
    // A runtime can be initialized only once per process, so the result is kept.
    static DEVICE: std::sync::OnceLock<Result<Device, String>> = std::sync::OnceLock::new();
    DEVICE.get_or_init(|| Device::wgpu_options().init().map_err(|error| error.to_string())).clone()
}

#[cfg(feature = "cuda")]
pub(crate) fn cuda() -> Result<Device, String> {
    use burn::tensor::{DeviceIndex, DeviceType};
    // Opening a device panics if the driver is missing.
    match Device::enumerate(DeviceType::Cuda).is_empty() {
        true => Err("no NVIDIA GPU that this process sees".to_string()),
        false => Ok(Device::cuda(DeviceIndex::Default)),
    }
}

/// A device that a server in this process runs on the CPU.
#[cfg(all(feature = "remote", feature = "flex"))]
pub(crate) fn remote() -> Result<Device, String> {
    use std::sync::OnceLock;

    use burn::server::RemoteServer;
    use kv_device::remote::Loopback;
    static SERVER: OnceLock<Loopback> = OnceLock::new();
    let server = SERVER.get_or_init(|| {
        let server = RemoteServer::new([Device::flex()]);
        let server = kv_weights::remote::serve_ops::<burn::backend::Flex>(server);
        Loopback::serve(&server).unwrap()
    });
    server.device(0, None).map_err(|error| error.to_string())
}
