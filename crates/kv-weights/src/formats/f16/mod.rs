//! Numbers of 16 bits as IEEE 754 has them, two to a word; no scale.

#[cfg(feature = "cube")]
pub(super) mod cube;
#[cfg(all(feature = "flex", target_arch = "aarch64"))]
mod neon;
pub(super) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod x86;

use super::{HALF_OFFSETS, Spec};

pub(super) const SPEC: Spec = Spec {
    name: "f16",
    numbers: 32,
    bytes: 64,
    ggml: Some(1),
    halves: &HALF_OFFSETS,
    exponent: None,
};
