//! Multiplies the factors of a group by their scales.

use core::arch::x86_64::*;

use super::super::parameters::WIDEN;
use crate::simd::vnni::{LANES, LARGER_MAGNITUDE, across, first_lanes};

/// The sums that [`fold`] returns for the factors of a group, for each query row.
#[derive(Clone, Copy)]
pub(super) struct Folded<const ROWS: usize> {
    /// Sum of factor times minimum.
    pub(super) base: [f32; ROWS],
    /// Largest magnitude of factor times scale.
    pub(super) largest: [f32; ROWS],
}

/// Multiplies `ROWS` rows of `n` factors (`stride` apart) by their scales, and writes them to
/// `scaled` (rows `scaled_stride` apart). `params(i)` are the 16 parameter words of factors i to
/// i + 15.
///
/// Factors that are not finite cannot become integers. They reach the result through
/// [`base`](Folded::base).
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn fold<const ROWS: usize>(
    n: usize,
    params: impl Fn(usize) -> __m512i,
    factors: &[f32],
    stride: usize,
    scaled: &mut [f32],
    scaled_stride: usize,
) -> Folded<ROWS> {
    assert!((ROWS - 1) * stride + n <= factors.len());
    assert!((ROWS - 1) * scaled_stride + n.next_multiple_of(LANES) <= scaled.len());
    let [mut base, mut largest] = [[_mm512_setzero_ps(); ROWS]; 2];
    for first in (0..n).step_by(LANES) {
        let (scale, min) = unpack_parameters(params(first));
        let wanted = first_lanes(n - first);
        for row in 0..ROWS {
            // SAFETY: the n factors are in the slice, as asserted, and `wanted` masks all others.
            let factor = unsafe {
                let factors = factors.as_ptr().add(row * stride + first);
                _mm512_maskz_loadu_ps(wanted, factors)
            };
            let product = _mm512_mul_ps(factor, scale);
            // SAFETY: a row of `scaled` has room for whole vectors, as asserted.
            unsafe {
                _mm512_storeu_ps(scaled.as_mut_ptr().add(row * scaled_stride + first), product)
            };
            base[row] = _mm512_fmadd_ps(factor, min, base[row]);
            largest[row] = _mm512_range_ps::<LARGER_MAGNITUDE>(largest[row], product);
        }
    }
    Folded {
        base: across(base, |a, b| _mm512_add_ps(a, b)),
        largest: across(largest, |a, b| _mm512_max_ps(a, b)),
    }
}

/// Computes [`unpack_parameters`](super::super::parameters::unpack_parameters) of a vector of
/// words.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn unpack_parameters(words: __m512i) -> (__m512, __m512) {
    let magnitude = _mm512_set1_epi32(0x7fff << 13);
    let scale = _mm512_and_si512(_mm512_slli_epi32::<13>(words), magnitude);
    // An arithmetic shift keeps the sign bit in place and copies it to the right. `signed` masks
    // the copies.
    let signed = _mm512_or_si512(magnitude, _mm512_set1_epi32(i32::MIN));
    let min = _mm512_and_si512(_mm512_srai_epi32::<3>(words), signed);
    let widen = _mm512_set1_ps(WIDEN);
    let scale = _mm512_mul_ps(_mm512_castsi512_ps(scale), widen);
    (scale, _mm512_mul_ps(_mm512_castsi512_ps(min), widen))
}
