//! Scale and minimum (f16), 16 bytes of codes.

#[cfg(feature = "cube")]
pub(super) mod cube;
pub(super) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod vnni;

use super::Spec;

pub(super) const SPEC: Spec =
    Spec { name: "q4_1", numbers: 32, bytes: 20, ggml: Some(3), halves: &[0, 2], exponent: None };
