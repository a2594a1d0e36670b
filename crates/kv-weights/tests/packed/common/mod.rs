//! Shared by all cases: devices, random blocks, macros.

mod data;
pub(crate) mod devices;

use std::io::Write;

use burn::tensor::Device;

pub(crate) use data::{Blocks, Rng, device_blocks, host, magnitudes, matrix};

/// Runs a case on a device, if it can be opened.
pub(crate) fn run(device: Result<Device, String>, case: fn(&Device)) {
    match device {
        Ok(device) => case(&device),
        Err(why) if std::env::var_os("KV_ALLOW_NO_DEVICE").is_some_and(|value| value == "1") => {
            let test = std::thread::current().name().unwrap_or("test").to_string();
            writeln!(std::io::stderr().lock(), "SKIPPED {test}: {why}").unwrap();
        }
        Err(why) => panic!("{why} (KV_ALLOW_NO_DEVICE=1 skips the tests of a missing device)"),
    }
}

/// Creates a test on every device for each case, a function `fn case(device: &Device)`.
macro_rules! stamp {
    ($($case:ident),+ $(,)?) => { $crate::common::stamp_each! {
        flex "flex" [$crate::common::devices::flex()]
        wgpu "wgpu" [$crate::common::devices::wgpu()]
        cuda "cuda" [$crate::common::devices::cuda()]
        => [$($case)+]
    } };
}

/// Creates the same tests on devices with autodiff.
#[cfg(feature = "autodiff")]
macro_rules! stamp_autodiff {
    ($($case:ident),+ $(,)?) => { $crate::common::stamp_each! {
        flex "flex" [$crate::common::devices::flex().map(burn::tensor::Device::autodiff)]
        wgpu "wgpu" [$crate::common::devices::wgpu().map(burn::tensor::Device::autodiff)]
        cuda "cuda" [$crate::common::devices::cuda().map(burn::tensor::Device::autodiff)]
        remote "remote" [$crate::common::devices::remote().map(burn::tensor::Device::autodiff)]
        => [$($case)+]
    } };
}

macro_rules! stamp_each {
    ($($name:ident $feature:literal [$device:expr])+ => $cases:tt) => {
        $($crate::common::stamp_one! { $name $feature [$device] $cases })+
    };
}

macro_rules! stamp_one {
    ($name:ident $feature:literal [$device:expr] [$($case:ident)+]) => {
        #[cfg(feature = $feature)]
        mod $name {
            $(
                #[test]
                fn $case() {
                    $crate::common::run($device, super::$case);
                }
            )+
        }
    };
}

#[cfg(feature = "autodiff")]
pub(crate) use stamp_autodiff;
pub(crate) use {stamp, stamp_each, stamp_one};
