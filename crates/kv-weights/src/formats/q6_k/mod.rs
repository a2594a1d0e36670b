//! 128 bytes of the codes' lower four bits, 64 of their upper two, 16 signed scales, a scale of scales (f16).

#[cfg(feature = "cube")]
pub(super) mod cube;
pub(super) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod vnni;

use super::Spec;

pub(super) const SPEC: Spec =
    Spec { name: "q6_k", numbers: 256, bytes: 210, ggml: Some(14), halves: &[208], exponent: None };
