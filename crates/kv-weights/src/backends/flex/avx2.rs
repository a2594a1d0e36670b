//! AVX2 with FMA and F16C.

use core::arch::x86_64::*;

use super::{
    few,
    instructions::{CodeInstructions, Instructions},
    integers::Rows,
    wide_row,
};
use crate::formats::{
    unpack::{Blocks, Halves},
    wide::Vectors,
};

pub(super) struct Avx2;

impl Halves for Avx2 {
    #[inline(always)]
    fn widened(bits: u16) -> f32 {
        // SAFETY: only functions compiled for F16C unpack with it.
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))) }
    }
}

impl Instructions for Avx2 {
    type Vector = __m256;
    const LANES: usize = 8;

    fn available() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn fetch(byte: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(byte.cast());
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn splat(number: f32) -> __m256 {
        _mm256_set1_ps(number)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(numbers: &[f32]) -> __m256 {
        // SAFETY: the slice has 8 numbers.
        unsafe { _mm256_loadu_ps(numbers[..8].as_ptr()) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn widened<W: Vectors>(bits: &[u16]) -> __m256 {
        // SAFETY: the processor has the instructions, as the caller says.
        unsafe { W::eight(&bits.as_chunks().0[0]) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn multiply_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn total(vector: __m256) -> f32 {
        let four = _mm_add_ps(_mm256_castps256_ps128(vector), _mm256_extractf128_ps::<1>(vector));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn row_of_wide<W: Vectors>(row: &[u16], x: &[f32], out: &mut [f32]) {
        // SAFETY: the processor has the instructions, as the caller says.
        unsafe { wide_row::row::<Self, W>(row, x, out) }
    }
}

impl CodeInstructions for Avx2 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn integer_products(codes: &[u8], zero: u8, x: &[i16]) -> __m256 {
        let mut products = _mm256_setzero_si256();
        for (codes, x) in codes.as_chunks().0.iter().zip(x.as_chunks::<16>().0) {
            // SAFETY: the array has 32 bytes.
            let x = unsafe { _mm256_loadu_si256(x.as_ptr().cast()) };
            products = _mm256_add_epi32(products, _mm256_madd_epi16(sixteen(codes, zero), x));
        }
        _mm256_cvtepi32_ps(products)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn float_products(
        codes: &[u8],
        zero: u8,
        [scale, min]: [__m256; 2],
        x: &[f32],
        mut sums: __m256,
    ) -> __m256 {
        for (codes, x) in codes.as_chunks().0.iter().zip(x.as_chunks::<16>().0) {
            let codes = sixteen(codes, zero);
            let halves = [_mm256_castsi256_si128(codes), _mm256_extracti128_si256::<1>(codes)];
            for (codes, x) in halves.into_iter().zip(x.as_chunks::<8>().0) {
                let codes = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(codes));
                // SAFETY: the array has 32 bytes.
                let x = unsafe { _mm256_loadu_ps(x.as_ptr()) };
                sums = _mm256_fmadd_ps(_mm256_fmadd_ps(codes, scale, min), x, sums);
            }
        }
        sums
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn row<F: Blocks>(row: &[u8], x: &Rows<'_>, columns: usize, out: &mut [f32]) {
        // SAFETY: the processor has the instructions, as the caller says.
        unsafe { few::row::<Self, F>(row, x, columns, out) }
    }
}

/// Returns 16 codes minus the zero code.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sixteen(codes: &[u8; 16], zero: u8) -> __m256i {
    // SAFETY: the array has 16 bytes.
    let codes = unsafe { _mm256_cvtepu8_epi16(_mm_loadu_si128(codes.as_ptr().cast())) };
    _mm256_sub_epi16(codes, _mm256_set1_epi16(i16::from(zero)))
}
