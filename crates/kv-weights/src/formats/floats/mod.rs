//! 16-bit floats without scales, two to a word: f16, and bf16, the upper half of an f32.

#[cfg(feature = "cube")]
pub(crate) mod cube;
#[cfg(all(feature = "flex", target_arch = "aarch64"))]
mod neon;
pub(crate) mod unpack;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod x86;

use super::Spec;

/// The byte offsets of the f16 numbers of a block.
const HALF_OFFSETS: [usize; 32] = {
    let mut offsets = [0; 32];
    let mut i = 0;
    while i < 32 {
        offsets[i] = 2 * i;
        i += 1;
    }
    offsets
};

const fn spec(halves: &'static [usize]) -> Spec {
    Spec { numbers: 32, bytes: 64, halves, exponent: None }
}

/// Returns whether all bf16 numbers of a block are finite, that is, have an exponent with a 0 bit.
pub(super) fn bf16_finite(block: &[u8]) -> bool {
    block.as_chunks::<2>().0.iter().all(|half| u16::from_le_bytes(*half) & 0x7f80 != 0x7f80)
}
