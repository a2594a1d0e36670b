//! Devices that share out work, as a command-line argument.

#[cfg(feature = "remote")]
mod connect;
mod places;
mod workers;

use core::{fmt, ops::Range, str::FromStr};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use kv_cubecl::{On, Target};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[cfg(feature = "remote")]
pub use self::connect::before_exit;
#[cfg(feature = "remote")]
pub(crate) use self::connect::guarded;
use self::places::{Place, number, places};
pub use self::workers::{TokenArgs, WorkerArgs, WorkerToken};
use crate::Backend;

/// Devices of one backend: `flex:2`, the CPU twice; `wgpu:0,1` or `cuda:0-7`, by index;
/// `remote:HOST:PORT/0`, of workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceList {
    backend: Backend,
    /// The devices of this machine by index, ascending. All of the CPU are the same device.
    indices: Vec<usize>,
    /// The devices of workers. One of the lists is empty.
    places: Vec<Place>,
}

impl DeviceList {
    /// Returns the backend.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// Returns the number of devices, which is at least 1.
    pub fn count(&self) -> usize {
        self.indices.len() + self.places.len()
    }

    /// Returns how many of the devices share one memory.
    pub fn sharing_memory(&self) -> usize {
        if self.backend == Backend::Flex { self.count() } else { 1 }
    }

    /// Opens the devices of `list`, or else the target's default one.
    ///
    /// # Errors
    /// A device that cannot be opened.
    pub fn open_or_default<T: Target>(
        list: Option<&Self>,
        workers: &WorkerArgs,
    ) -> Result<Vec<On<T>>> {
        match list {
            Some(list) => list.open(workers),
            None => Ok(vec![On::open()?]),
        }
    }

    /// Opens the devices, of the target of this list's backend.
    ///
    /// # Errors
    /// An index without a device, or a worker that gives no device.
    pub fn open<T: Target>(&self, workers: &WorkerArgs) -> Result<Vec<On<T>>> {
        match self.backend {
            Backend::Flex => return Ok(vec![On::open()?; self.count()]),
            Backend::Remote => return self.connect(workers),
            Backend::Wgpu | Backend::Cuda => {}
        }
        let found = T::devices()?;
        let device = |&index: &usize| {
            let device = found.get(index).cloned().with_context(|| {
                format!(
                    "devices {self}: {} has devices 0 to {}",
                    T::NAME,
                    found.len().saturating_sub(1)
                )
            })?;
            Ok(On::new(device)?)
        };
        self.indices.iter().map(device).collect()
    }

    #[cfg(feature = "remote")]
    fn connect<T: Target>(&self, workers: &WorkerArgs) -> Result<Vec<On<T>>> {
        let devices = connect::connect(&self.places, workers)?.into_iter().map(|device| {
            // The target may be one with automatic differentiation.
            Ok(On::new(device.clone()).or_else(|_| On::new(device.autodiff()))?)
        });
        devices.collect()
    }

    #[cfg(not(feature = "remote"))]
    fn connect<T: Target>(&self, _: &WorkerArgs) -> Result<Vec<On<T>>> {
        bail!("devices {self}: workers are not built into this program; use --features remote")
    }
}

impl FromStr for DeviceList {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, list) = text.split_once(':').unwrap_or((text, ""));
        if name == "remote" {
            let (backend, indices) = (Backend::Remote, Vec::new());
            return Ok(Self { backend, indices, places: places(list)? });
        }
        let Ok(backend) = Backend::from_str(name, false) else {
            bail!(
                "must start with a backend: flex:2, wgpu:0,1, cuda:0-7 or \
                 remote:HOST:PORT/0"
            );
        };
        let range = |text: &str| -> Result<Range<usize>> {
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            Ok(number(first)?..number(last)? + 1)
        };
        let indices = match (backend, list) {
            (_, "") if !text.contains(':') => vec![0],
            (Backend::Flex, count) => (0..number(count)?).collect(),
            (_, list) => {
                let ranges = list.split(',').map(range).collect::<Result<Vec<_>>>()?;
                ranges.into_iter().flatten().collect()
            }
        };
        if indices.is_empty() {
            bail!("must name at least one device");
        }
        if !indices.is_sorted_by(|a, b| a < b) {
            bail!("must list devices once, in ascending order");
        }
        Ok(Self { backend, indices, places: Vec::new() })
    }
}

impl fmt::Display for DeviceList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = format!("{:?}", self.backend).to_lowercase();
        match self.backend {
            Backend::Flex => write!(f, "{name}:{}", self.indices.len()),
            _ => {
                let indices = self.indices.iter().map(ToString::to_string);
                let places = self.places.iter().map(ToString::to_string);
                write!(f, "{name}:{}", indices.chain(places).collect::<Vec<_>>().join(","))
            }
        }
    }
}

impl Serialize for DeviceList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DeviceList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|why| serde::de::Error::custom(format!("devices {text}: {why}")))
    }
}

/// The devices that share out the work of a command.
#[derive(Clone, Debug, clap::Args)]
pub struct DeviceArgs {
    /// Devices that share out the work, instead of --backend: flex:2 (the CPU as two devices, which
    /// share its threads), wgpu:0,1, cuda:0-7, or devices that kv-train worker serves on other
    /// machines, remote:HOST:PORT/0,HOST:PORT/0-1. The results are the same as on one device.
    #[arg(long, value_name = "LIST", conflicts_with = "backend")]
    devices: Option<DeviceList>,
    #[command(flatten)]
    workers: WorkerArgs,
}

impl DeviceArgs {
    /// Returns the backend of the devices, or else `backend`.
    pub fn backend(&self, backend: Backend) -> Backend {
        self.devices.as_ref().map_or(backend, DeviceList::backend)
    }

    /// Opens the devices; by default the target's default one.
    ///
    /// # Errors
    /// A device that cannot be opened.
    pub fn open<T: Target>(&self) -> Result<Vec<On<T>>> {
        DeviceList::open_or_default(self.devices.as_ref(), &self.workers)
    }

    /// Returns how many of the devices share one memory.
    pub fn sharing_memory(&self) -> usize {
        self.devices.as_ref().map_or(1, DeviceList::sharing_memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_shown() {
        let read = |text: &str| text.parse::<DeviceList>().map(|list| (list.to_string(), list));
        for (text, shown, indices) in [
            ("flex", "flex:1", vec![0]),
            ("flex:3", "flex:3", vec![0, 1, 2]),
            ("wgpu", "wgpu:0", vec![0]),
            ("wgpu:1", "wgpu:1", vec![1]),
            ("cuda:0-3", "cuda:0,1,2,3", vec![0, 1, 2, 3]),
            ("cuda:0,2-3,7", "cuda:0,2,3,7", vec![0, 2, 3, 7]),
            ("remote:a:1/0-1,[::1]:2", "remote:a:1/0,a:1/1,[::1]:2/0", vec![]),
        ] {
            let (name, list) = read(text).unwrap();
            assert_eq!((&*name, &list.indices), (shown, &indices), "{text}");
            assert_eq!(read(&name).unwrap().1, list);
            let json = serde_json::to_string(&list).unwrap();
            assert_eq!(serde_json::from_str::<DeviceList>(&json).unwrap(), list);
        }
        for (text, why) in [
            ("", "start with a backend"),
            ("gpu:0", "start with a backend"),
            ("2", "start with a backend"),
            ("remote", "HOST:PORT"),
            ("remote:a:1/0,a:1/0", "once"),
            ("flex:", "whole number"),
            ("flex:0", "at least one"),
            ("flex:-1", "whole number"),
            ("flex:99999999999999999999", "whole number"),
            ("flex:1,2", "whole number"),
            ("wgpu:", "whole number"),
            ("wgpu:0,0", "once"),
            ("wgpu:1,0", "ascending"),
            ("cuda:3-1", "at least one"),
            ("cuda:0-", "whole number"),
            ("cuda:0-18446744073709551615", "whole number"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
