//! An exponent, 16 bytes of codes. The numbers are doubled to be integers, and the scale is half of what the exponent
//! stands for: `2^(exponent - 128)`.

#[cfg(feature = "cube")]
pub(crate) mod cube;
pub(crate) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod vnni;

use super::Spec;

pub(super) const SPEC: Spec = Spec { numbers: 32, bytes: 17, halves: &[], exponent: Some(0) };
