//! Blocks of 256 codes of 6 bits in groups of 16: Q6_K.
//!
//! A block is 128 bytes of the codes' lower four bits, 64 bytes of their upper two bits, 16 signed
//! scales and the scale of the scales (f16).

#[cfg(feature = "cube")]
pub(crate) mod cube;
pub(crate) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod vnni;

use super::Spec;

pub(super) const SPEC: Spec = Spec { numbers: 256, bytes: 210, halves: &[208], exponent: None };
