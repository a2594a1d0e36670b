//! Blocks of 32 codes of 4 bits (E2M1) with a power of two: MXFP4.
//!
//! A block is an exponent and 16 bytes of codes. Numbers are doubled to make them integers, so the
//! scale is half of what the exponent means: `2^(exponent - 128)`.

#[cfg(feature = "cube")]
pub(crate) mod cube;
pub(crate) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod vnni;

use super::Spec;

pub(super) const SPEC: Spec = Spec { numbers: 32, bytes: 17, halves: &[], exponent: Some(0) };
