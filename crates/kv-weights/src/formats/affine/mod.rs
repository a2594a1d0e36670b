//! Blocks of 32 codes of 4 or 5 bits with a scale and a minimum: Q4_1 and Q5_1.
//!
//! A block is scale and minimum (f16), for codes of 5 bits a word of their fifth bits, then 16
//! bytes of their lower four bits.

#[cfg(feature = "cube")]
pub(crate) mod cube;
pub(crate) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod vnni;

use super::Spec;

/// Bytes of a scale and a minimum.
const HEADER: usize = 4;

/// Returns the byte of a block at which its codes begin.
const fn codes_at(bits: usize) -> usize {
    if bits == 5 { HEADER + 4 } else { HEADER }
}

const fn spec(bits: usize) -> Spec {
    Spec { numbers: 32, bytes: codes_at(bits) + 16, halves: &[0, 2], exponent: None }
}
