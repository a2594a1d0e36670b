//! What every case uses: devices, random blocks, comparisons.

mod data;

use std::io::Write;

use burn::tensor::Device;
use kv_cubecl::{Error, On, Target};

pub(crate) use data::{Blocks, Rng, device_blocks, matrix};

/// Runs a case on a target's device.
pub(crate) fn run<T: Target>(case: fn(&Device)) {
    match On::<T>::open() {
        Ok(on) => case(&on),
        Err(error @ Error::NoDevice { .. })
            if std::env::var_os("KV_ALLOW_NO_DEVICE").is_some_and(|value| value == "1") =>
        {
            let test = std::thread::current().name().unwrap_or("test").to_string();
            writeln!(std::io::stderr().lock(), "SKIPPED {test}: {error}").unwrap();
        }
        Err(error) => panic!("{error} (KV_ALLOW_NO_DEVICE=1 skips the tests of a missing device)"),
    }
}

/// Makes a test for every target out of each case, a function `fn case(device: &Device)`.
macro_rules! stamp {
    ($($case:ident),+ $(,)?) => { $crate::common::stamp_one! {
        flex [kv_cubecl::Flex] [$($case)+]
    } };
}

/// As `stamp`, for `Autodiff` of every target.
#[cfg(feature = "autodiff")]
macro_rules! stamp_autodiff {
    ($($case:ident),+ $(,)?) => { $crate::common::stamp_one! {
        flex [kv_cubecl::Autodiff<kv_cubecl::Flex>] [$($case)+]
    } };
}

macro_rules! stamp_one {
    ($name:ident [$target:ty] [$($case:ident)+]) => {
        mod $name {
            $(
                #[test]
                fn $case() {
                    $crate::common::run::<$target>(super::$case);
                }
            )+
        }
    };
}

#[cfg(feature = "autodiff")]
pub(crate) use stamp_autodiff;
pub(crate) use {stamp, stamp_one};
