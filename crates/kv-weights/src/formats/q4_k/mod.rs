//! Scales of scales and of minima (f16), eight scales and minima of 6 bits, 128 bytes of codes: of each 32 bytes
//! the lower halves are a group, the upper halves the next.

#[cfg(feature = "cube")]
pub(crate) mod cube;
pub(crate) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod vnni;

use super::Spec;

pub(super) const SPEC: Spec = Spec { numbers: 256, bytes: 144, halves: &[0, 2], exponent: None };
