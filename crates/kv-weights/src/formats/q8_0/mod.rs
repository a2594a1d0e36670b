//! Scale (f16), 32 signed bytes.

#[cfg(feature = "cube")]
pub(super) mod cube;
pub(super) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod vnni;

use super::Spec;

pub(super) const SPEC: Spec =
    Spec { name: "q8_0", numbers: 32, bytes: 34, ggml: Some(8), halves: &[0], exponent: None };
