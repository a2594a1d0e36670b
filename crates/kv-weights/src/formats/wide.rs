//! Numbers of 16 bits in vectors of x86-64.

use core::arch::x86_64::*;

use super::flex::Wide;

/// A format of numbers of 16 bits as vector kernels read it.
pub(crate) trait Vectors: Wide {
    /// Eight numbers in f32.
    ///
    /// # Safety
    /// The processor has AVX2, FMA and F16C.
    unsafe fn eight(bits: &[u16; 8]) -> __m256;

    /// Sixteen numbers in f32.
    ///
    /// # Safety
    /// The processor has AVX-512.
    unsafe fn sixteen(bits: &[u16; 16]) -> __m512;
}
