//! One conformance suite for every target: each case is a function of a device, from which `stamp!` makes
//! a test for each of Flex, WGPU and CUDA whose feature is on.
//!
//! A target whose device cannot be opened fails its tests, unless `KV_ALLOW_NO_DEVICE=1`; then they say `SKIPPED` on
//! standard error. Random inputs come from fixed seeds.
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
