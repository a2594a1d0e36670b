//! 128 bytes of the codes' lower four bits, 64 of their upper two, 16 signed scales, a scale of scales (f16).

#[cfg(feature = "cube")]
pub(crate) mod cube;
pub(crate) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod vnni;

use super::Spec;

pub(super) const SPEC: Spec = Spec { numbers: 256, bytes: 210, halves: &[208], exponent: None };
