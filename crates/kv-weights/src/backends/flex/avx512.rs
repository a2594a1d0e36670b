//! AVX-512 for 16-bit weights. Weights in codes use byte products instead, if there is VNNI.

use core::arch::x86_64::*;

use super::{instructions::Instructions, wide_row};
use crate::formats::wide::Vectors;

pub(super) struct Avx512;

impl Instructions for Avx512 {
    type Vector = __m512;
    const LANES: usize = 16;

    fn available() -> bool {
        is_x86_feature_detected!("avx512f")
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn fetch(byte: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(byte.cast());
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn splat(number: f32) -> __m512 {
        _mm512_set1_ps(number)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(numbers: &[f32]) -> __m512 {
        // SAFETY: the slice has 16 numbers.
        unsafe { _mm512_loadu_ps(numbers[..16].as_ptr()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn widened<W: Vectors>(bits: &[u16]) -> __m512 {
        // SAFETY: the processor has the instructions, as the caller says.
        unsafe { W::sixteen(&bits.as_chunks().0[0]) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn multiply_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn total(vector: __m512) -> f32 {
        _mm512_reduce_add_ps(vector)
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn row_of_wide<W: Vectors>(row: &[u16], x: &[f32], out: &mut [f32]) {
        // SAFETY: the processor has the instructions, as the caller says.
        unsafe { wide_row::row::<Self, W>(row, x, out) }
    }
}
