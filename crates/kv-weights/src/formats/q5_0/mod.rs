//! Scale (f16), a word of the codes' fifth bits, 16 bytes of their lower four.

#[cfg(feature = "cube")]
pub(super) mod cube;
pub(super) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod vnni;

use super::Spec;

pub(super) const SPEC: Spec =
    Spec { name: "q5_0", numbers: 32, bytes: 22, ggml: Some(6), halves: &[0], exponent: None };
