//! Backends as types: [`Target`], and [`On`], a device of a target.

use core::{fmt, marker::PhantomData, ops::Deref};

use burn::{backend::DispatchDevice, tensor::Device};

use crate::{Error, KvCacheOps, Result, sparse::SparseOps};

/// A place to run, chosen at compile time.
///
/// Burn chooses its backend at run time by [`Device`]. A target is the same choice as a type, which
/// exists only if the feature of its backend is on.
///
/// ```
/// use kv_cubecl::{Flex, On, Target};
///
/// fn report<T: Target>() -> kv_cubecl::Result<String> {
///     let device = On::<T>::open()?;
///     Ok(format!("{} on {:?}", T::NAME, *device))
/// }
/// assert!(report::<Flex>()?.starts_with("flex"));
/// # Ok::<(), kv_cubecl::Error>(())
/// ```
pub trait Target: Copy + fmt::Debug + Send + Sync + 'static {
    /// Burn's backend of this target.
    type Backend: KvCacheOps + SparseOps;

    /// Name for users to read and write, such as `flex`.
    const NAME: &'static str;

    /// Returns whether `device` belongs to this target.
    fn hosts(device: &Device) -> bool;

    /// Opens the default device of this target.
    ///
    /// # Errors
    /// [`Error::NoDevice`] when this machine has none.
    fn open() -> Result<Device>;

    /// Returns all devices of this target by index. The CPU is one device.
    ///
    /// # Errors
    /// [`Error::NoDevice`] when this machine has none.
    fn devices() -> Result<Vec<Device>>;
}

/// Burn's CPU backend.
#[cfg(feature = "flex")]
#[derive(Clone, Copy, Debug)]
pub struct Flex;

#[cfg(feature = "flex")]
impl Target for Flex {
    type Backend = burn::backend::Flex;
    const NAME: &'static str = "flex";

    fn hosts(device: &Device) -> bool {
        matches!(device.as_dispatch(), DispatchDevice::Flex(_))
    }

    fn open() -> Result<Device> {
        Ok(Device::flex())
    }

    fn devices() -> Result<Vec<Device>> {
        Ok(vec![Device::flex()])
    }
}

/// WGPU: Vulkan, Metal, DirectX 12 or a browser.
#[cfg(feature = "wgpu")]
#[derive(Clone, Copy, Debug)]
pub struct Wgpu;

#[cfg(feature = "wgpu")]
impl Target for Wgpu {
    type Backend = burn::backend::Wgpu;
    const NAME: &'static str = "wgpu";

    fn hosts(device: &Device) -> bool {
        is_cube(device, burn::backend::RuntimeId::Wgpu)
    }

    fn open() -> Result<Device> {
        use std::sync::OnceLock;
        // A runtime can be initialized only once per process, so the result is kept.
        static DEVICE: OnceLock<Result<Device, String>> = OnceLock::new();
        DEVICE
            .get_or_init(|| Device::wgpu_options().init().map_err(|error| error.to_string()))
            .clone()
            .map_err(|why| {
                let why = format!("{why}; is a Vulkan, Metal or DirectX 12 driver installed?");
                Error::NoDevice { target: Self::NAME, why }
            })
    }

    fn devices() -> Result<Vec<Device>> {
        Self::open()?;
        let devices = Device::enumerate(burn::tensor::DeviceType::Wgpu);
        Ok(devices.into_iter().filter(Self::hosts).collect())
    }
}

/// NVIDIA CUDA.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug)]
pub struct Cuda;

#[cfg(feature = "cuda")]
impl Target for Cuda {
    type Backend = burn::backend::Cuda;
    const NAME: &'static str = "cuda";

    fn hosts(device: &Device) -> bool {
        is_cube(device, burn::backend::RuntimeId::Cuda)
    }

    fn open() -> Result<Device> {
        use burn::tensor::{DeviceIndex, DeviceType};
        let no_device = |why: String| Error::NoDevice { target: Self::NAME, why };
        // Enumerating devices first, because opening one panics and prints where the driver is
        // missing.
        if Device::enumerate(DeviceType::Cuda).is_empty() {
            let why = "no NVIDIA driver, or no GPU that it shows to this process".to_string();
            return Err(no_device(why));
        }
        // Opening a device panics as well if the driver does not work.
        std::panic::catch_unwind(|| {
            let device = Device::cuda(DeviceIndex::Default);
            device.sync().map(|()| device).map_err(|error| format!("{error:?}"))
        })
        .unwrap_or_else(|_| Err("the CUDA driver could not be started".to_string()))
        .map_err(no_device)
    }

    fn devices() -> Result<Vec<Device>> {
        Self::open()?;
        Ok(Device::enumerate(burn::tensor::DeviceType::Cuda).into_iter().collect())
    }
}

/// Devices of another process or machine, through burn-remote.
///
/// A server says which devices there are, and this target knows none: open them with
/// `burn::tensor::Device::remote_options`. The server runs the operations of this crate if it was
/// given them by [`remote::serve_ops`](crate::remote::serve_ops).
#[cfg(feature = "remote")]
#[derive(Clone, Copy, Debug)]
pub struct Remote;

#[cfg(feature = "remote")]
impl Target for Remote {
    type Backend = burn::backend::Remote;
    const NAME: &'static str = "remote";

    fn hosts(device: &Device) -> bool {
        matches!(device.as_dispatch(), DispatchDevice::Remote(_))
    }

    fn open() -> Result<Device> {
        let why = "no server is named; try --devices remote:HOST:PORT/INDEX".to_string();
        Err(Error::NoDevice { target: Self::NAME, why })
    }

    fn devices() -> Result<Vec<Device>> {
        Self::open().map(|device| vec![device])
    }
}

/// Automatic differentiation over another target.
#[cfg(feature = "autodiff")]
#[derive(Clone, Copy, Debug)]
pub struct Autodiff<T>(PhantomData<T>);

#[cfg(feature = "autodiff")]
impl<T: Target> Target for Autodiff<T>
where
    burn::backend::Autodiff<T::Backend>: KvCacheOps,
{
    type Backend = burn::backend::Autodiff<T::Backend>;
    const NAME: &'static str = T::NAME;

    fn hosts(device: &Device) -> bool {
        device.is_autodiff() && T::hosts(&device.clone().without_autodiff())
    }

    fn open() -> Result<Device> {
        T::open().map(Device::autodiff)
    }

    fn devices() -> Result<Vec<Device>> {
        Ok(T::devices()?.into_iter().map(Device::autodiff).collect())
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn is_cube(device: &Device, runtime: burn::backend::RuntimeId) -> bool {
    matches!(device.as_dispatch(), DispatchDevice::Cube(cube) if cube.runtime() == runtime)
}

/// A device known to belong to target `T`.
#[derive(Clone)]
pub struct On<T: Target> {
    device: Device,
    target: PhantomData<T>,
}

impl<T: Target> On<T> {
    /// Opens the target's default device.
    ///
    /// # Errors
    /// [`Error::NoDevice`] when this machine has none.
    pub fn open() -> Result<Self> {
        T::open().and_then(Self::new)
    }

    /// Takes a device of the target.
    ///
    /// # Errors
    /// [`Error::WrongTarget`] when it belongs to another one.
    pub fn new(device: Device) -> Result<Self> {
        if T::hosts(&device) {
            Ok(Self { device, target: PhantomData })
        } else {
            Err(Error::WrongTarget { target: T::NAME, device: format!("{device:?}") })
        }
    }
}

impl<T: Target> Deref for On<T> {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}

impl<T: Target> fmt::Debug for On<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "On<{}>({:?})", T::NAME, self.device)
    }
}
