//! An exponent, 16 bytes of codes. The numbers are doubled to be integers, and the scale is half of what the exponent
//! stands for: `2^(exponent - 128)`.

#[cfg(feature = "cube")]
pub(super) mod cube;
pub(super) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod vnni;

use super::Spec;

pub(super) const SPEC: Spec =
    Spec { name: "mxfp4", numbers: 32, bytes: 17, ggml: Some(39), halves: &[], exponent: Some(0) };
