//! As Q4_K, with 32 bytes before the codes: bit `i` of byte `j` is the fifth of code `j` of group `i`.

#[cfg(feature = "cube")]
pub(super) mod cube;
pub(super) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod vnni;

use super::Spec;

pub(super) const SPEC: Spec = Spec {
    name: "q5_k",
    numbers: 256,
    bytes: 176,
    ggml: Some(13),
    halves: &[0, 2],
    exponent: None,
};
