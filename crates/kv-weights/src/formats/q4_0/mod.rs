//! Scale (f16), 16 bytes of codes.

#[cfg(feature = "cube")]
pub(super) mod cube;
pub(super) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod vnni;

use super::Spec;

pub(super) const SPEC: Spec =
    Spec { name: "q4_0", numbers: 32, bytes: 18, ggml: Some(2), halves: &[0], exponent: None };
