//! Blocks of 256 codes of 4 or 5 bits, with a scale and a minimum of 6 bits for each 32: Q4_K and
//! Q5_K.
//!
//! A block has the scales of scales and minima (f16), 12 bytes of scales and minima, 32 bytes of
//! fifth bits for codes of 5 bits, and 128 bytes of lower four bits. Each 32 of the latter hold two
//! groups of 32 codes, one in the lower and one in the upper halves. Bit `i` of byte `j` of the
//! fifth bits belongs to code `j` of group `i`.

#[cfg(feature = "cube")]
pub(crate) mod cube;
pub(crate) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod vnni;

use super::Spec;

/// Bytes of scales and minima.
const HEADER: usize = 16;

/// Returns the byte of a block at which the lower bits of its codes begin.
const fn codes_at(bits: usize) -> usize {
    if bits == 5 { HEADER + 32 } else { HEADER }
}

const fn spec(bits: usize) -> Spec {
    Spec { numbers: 256, bytes: codes_at(bits) + 128, halves: &[0, 2], exponent: None }
}
