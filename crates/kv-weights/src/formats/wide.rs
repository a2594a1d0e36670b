//! 16-bit floats in vectors.

#[cfg(target_arch = "aarch64")]
use core::arch::aarch64::*;
#[cfg(target_arch = "x86_64")]
use core::arch::x86_64::*;

use super::unpack::Wide;

/// A format of 16-bit floats as vector kernels read it.
pub(crate) trait Vectors: Wide {
    ///
    /// # Safety
    /// The processor has NEON.
    #[cfg(target_arch = "aarch64")]
    unsafe fn four(bits: &[u16; 4]) -> float32x4_t;

    ///
    /// # Safety
    /// The processor has AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    unsafe fn eight(bits: &[u16; 8]) -> __m256;

    ///
    /// # Safety
    /// The processor has AVX-512.
    #[cfg(target_arch = "x86_64")]
    unsafe fn sixteen(bits: &[u16; 16]) -> __m512;
}
