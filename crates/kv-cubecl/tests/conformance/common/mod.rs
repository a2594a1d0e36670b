//! What every case uses: devices, inputs, comparisons.

mod check;
mod data;
mod file;
mod setup;

use std::io::Write;

use kv_cubecl::{Error, On, Target};

#[cfg(feature = "autodiff")]
pub(crate) use check::slopes;
pub(crate) use check::{CLOSE, close, equal_bits, same_contents, snapshot};
pub(crate) use data::{Host, Rng, wide};
pub(crate) use file::File;
pub(crate) use setup::{
    SAMPLED, Setup, attend, check_properties, chunk_sizes, sample, sampled, sampled_count,
    sampling, setups, windows,
};

/// Runs a case on a target's device.
pub(crate) fn run<T: Target>(case: fn(&On<T>)) {
    match open() {
        Ok(on) => case(&on),
        Err(error @ Error::NoDevice { .. })
            if std::env::var_os("KV_ALLOW_NO_DEVICE").is_some_and(|value| value == "1") =>
        {
            skipped(&error.to_string());
        }
        Err(error) => panic!("{error} (KV_ALLOW_NO_DEVICE=1 skips the tests of a missing device)"),
    }
}

/// Opens a target's device. A remote one is served by this process.
fn open<T: Target>() -> kv_cubecl::Result<On<T>> {
    #[cfg(all(feature = "remote", feature = "flex"))]
    if T::NAME == "remote" {
        let device = crate::remote::device();
        return On::new(device.clone()).or_else(|_| On::new(device.autodiff()));
    }
    On::open()
}

/// Reports that something was not tested and why. Written to standard error directly, because the
/// test harness captures `eprintln!`.
pub(crate) fn skipped(why: &str) {
    let test = std::thread::current().name().unwrap_or("test").to_string();
    writeln!(std::io::stderr().lock(), "SKIPPED {test}: {why}").unwrap();
}

/// Makes a test for every target out of each case, a function `fn case<T: Target>(on: &On<T>)`.
macro_rules! stamp {
    ($($case:ident),+ $(,)?) => { $crate::common::stamp_each! {
        flex "flex" [kv_cubecl::Flex] wgpu "wgpu" [kv_cubecl::Wgpu] cuda "cuda" [kv_cubecl::Cuda]
        => [$($case)+]
    } };
}

/// As `stamp`, for `Autodiff` of every target.
#[cfg(feature = "autodiff")]
macro_rules! stamp_autodiff {
    ($($case:ident),+ $(,)?) => { $crate::common::stamp_each! {
        flex "flex" [kv_cubecl::Autodiff<kv_cubecl::Flex>]
        wgpu "wgpu" [kv_cubecl::Autodiff<kv_cubecl::Wgpu>]
        cuda "cuda" [kv_cubecl::Autodiff<kv_cubecl::Cuda>]
        remote "remote" [kv_cubecl::Autodiff<kv_cubecl::Remote>]
        => [$($case)+]
    } };
}

macro_rules! stamp_each {
    ($($name:ident $feature:literal [$target:ty])+ => $cases:tt) => {
        $($crate::common::stamp_one! { $name $feature [$target] $cases })+
    };
}

macro_rules! stamp_one {
    ($name:ident $feature:literal [$target:ty] [$($case:ident)+]) => {
        #[cfg(feature = $feature)]
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
pub(crate) use {stamp, stamp_each, stamp_one};
