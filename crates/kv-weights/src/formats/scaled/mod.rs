//! Blocks of 32 codes of 4, 5 or 8 bits with one scale: Q4_0, Q5_0 and Q8_0.
//!
//! A block is the scale (f16), for codes of 5 bits a word of their fifth bits, then the codes: 16
//! bytes of their lower four bits, or 32 signed bytes.

#[cfg(feature = "cube")]
pub(crate) mod cube;
pub(crate) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod vnni;

use super::Spec;

/// Bytes of a scale.
const HEADER: usize = 2;

/// Returns the byte of a block at which its codes begin.
const fn codes_at(bits: usize) -> usize {
    if bits == 5 { HEADER + 4 } else { HEADER }
}

const fn spec(bits: usize) -> Spec {
    let bytes = codes_at(bits) + if bits == 8 { 32 } else { 16 };
    Spec { numbers: 32, bytes, halves: &[0], exponent: None }
}
