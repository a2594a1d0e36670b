//! The upper halves of numbers in f32, two to a word; no scale.

#[cfg(feature = "cube")]
pub(super) mod cube;
#[cfg(all(feature = "flex", target_arch = "aarch64"))]
mod neon;
pub(super) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod x86;

use super::Spec;

pub(super) const SPEC: Spec =
    Spec { name: "bf16", numbers: 32, bytes: 64, ggml: Some(30), halves: &[], exponent: None };

/// Whether all of these numbers are finite: not all bits of an exponent are set.
pub(super) fn finite(block: &[u8]) -> bool {
    block.as_chunks::<2>().0.iter().all(|half| u16::from_le_bytes(*half) & 0x7f80 != 0x7f80)
}
