//! As Q4_K, with 32 bytes before the codes: bit `i` of byte `j` is the fifth of code `j` of group `i`.

#[cfg(feature = "cube")]
pub(crate) mod cube;
pub(crate) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod vnni;

use super::Spec;

pub(super) const SPEC: Spec = Spec { numbers: 256, bytes: 176, halves: &[0, 2], exponent: None };
