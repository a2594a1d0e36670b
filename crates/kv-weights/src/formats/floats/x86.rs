use core::arch::x86_64::*;

use super::{
    super::wide::Vectors,
    unpack::{Bf16, F16},
};

impl Vectors for F16 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn eight(bits: &[u16; 8]) -> __m256 {
        // SAFETY: the array has 16 bytes.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(bits.as_ptr().cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sixteen(bits: &[u16; 16]) -> __m512 {
        // SAFETY: the array has 32 bytes.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(bits.as_ptr().cast()) })
    }
}

impl Vectors for Bf16 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn eight(bits: &[u16; 8]) -> __m256 {
        // SAFETY: the array has 16 bytes.
        let bits = _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(bits.as_ptr().cast()) });
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sixteen(bits: &[u16; 16]) -> __m512 {
        // SAFETY: the array has 32 bytes.
        let bits = _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(bits.as_ptr().cast()) });
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
    }
}
