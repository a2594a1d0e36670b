//! Conformance tests for every target. Each case is a function of a device, and `stamp!` creates a
//! test of it for each of Flex, WGPU and CUDA whose feature is enabled. Cases with gradients also
//! run on a remote device.
//!
//! If a device cannot be opened, its tests fail. With `KV_ALLOW_NO_DEVICE=1`, they print `SKIPPED`
//! on standard error instead. Random inputs have fixed seeds.
#![allow(clippy::unwrap_used, reason = "a failing test may panic")]

mod common;
mod formats;
mod fused;
#[cfg(feature = "autodiff")]
mod gradients;
mod matrix;
mod picked;
mod products;
mod quantize;
#[cfg(all(feature = "remote", feature = "flex"))]
mod remote;
