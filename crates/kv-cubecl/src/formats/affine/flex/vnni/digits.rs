//! Scales factors to integers, and writes them as signed digits to base 256.

use core::arch::x86_64::*;

use super::{
    super::{parameters::WIDEN, tile::MAX_ROWS},
    sizes::LANES,
};

/// The integer that the largest factor of a group is scaled to. Its sum with [`ZERO`] is below
/// 2^23, also when rounded up.
const LARGEST: f32 = 0x3f_7f00 as f32;

/// The number that makes the bytes of an integer its signed digits: subtracting `ZERO` from
/// `x + ZERO` byte by byte, without borrowing, leaves three signed bytes whose value is x.
const ZERO: u32 = 0x40_8080;

/// The lower bound of a group's largest factor, so that the division by it does not overflow.
/// Factors below it are too small to change a softmax.
const SMALLEST: f32 = 1e-30;

/// The sums that [`fold`] returns for the factors of a group, for each query row.
#[derive(Clone, Copy)]
pub(super) struct Folded {
    /// Sum of factor times minimum.
    pub(super) base: [f32; MAX_ROWS],
    /// Largest magnitude of factor times scale.
    pub(super) largest: [f32; MAX_ROWS],
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
) -> Folded {
    assert!((ROWS - 1) * stride + n <= factors.len());
    assert!((ROWS - 1) * scaled_stride + n.next_multiple_of(LANES) <= scaled.len());
    let [mut base, mut largest] = [[_mm512_setzero_ps(); MAX_ROWS]; 2];
    for first in (0..n).step_by(LANES) {
        let (scale, min) = unpack_parameters(params(first));
        let wanted = u16::MAX >> LANES.saturating_sub(n - first);
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

/// Overwrites the factors that [`fold`] has scaled with their digits. Returns for each row the
/// factor that the integer 1 stands for.
///
/// Four factors become four words: the four lowest digits, the four middle ones, the four highest,
/// and one word that is not read.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn to_digits<const ROWS: usize>(
    n: usize,
    largest: [f32; MAX_ROWS],
    scaled: &mut [f32],
    stride: usize,
) -> [f32; MAX_ROWS] {
    assert!((ROWS - 1) * stride + n.next_multiple_of(LANES) <= scaled.len());
    let largest = largest.map(|largest| largest.max(SMALLEST));
    let per_unit = largest.map(|largest| LARGEST / largest);
    // A float of 2^23 or more has no bits for a fraction, so this addition rounds to an integer.
    let zero = _mm512_set1_ps(((1 << 23) + ZERO) as f32);
    let zero_digits = _mm512_set1_epi32(ZERO as i32);
    let by_digit = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let by_digit = _mm512_broadcast_i32x4(by_digit);
    for first in (0..n).step_by(LANES) {
        for row in 0..ROWS {
            // SAFETY: a row of `scaled` has room for whole vectors, as asserted.
            unsafe {
                let digits = scaled.as_mut_ptr().add(row * stride + first);
                let per_unit = _mm512_set1_ps(per_unit[row]);
                let units = _mm512_fmadd_ps(_mm512_loadu_ps(digits), per_unit, zero);
                let bytes = _mm512_sub_epi8(_mm512_castps_si512(units), zero_digits);
                let bytes = _mm512_shuffle_epi8(bytes, by_digit);
                _mm512_storeu_ps(digits, _mm512_castsi512_ps(bytes));
            }
        }
    }
    largest.map(|largest| largest / LARGEST)
}

/// Selects the operation of `vrangeps`: the larger magnitude of two elements, as a positive number.
const LARGER_MAGNITUDE: i32 = 0b1011;

/// Reduces each of four vectors to one number.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn across(rows: [__m512; 4], with: impl Fn(__m512, __m512) -> __m512) -> [f32; 4] {
    let [a, b, c, d] = rows;
    let ab = with(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let cd = with(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    let lanes = with(_mm512_shuffle_ps::<0x44>(ab, cd), _mm512_shuffle_ps::<0xee>(ab, cd));
    let halves = with(lanes, _mm512_shuffle_f32x4::<0x4e>(lanes, lanes));
    let whole = with(halves, _mm512_shuffle_f32x4::<0xb1>(halves, halves));
    let mut out = [0.0; 4];
    // SAFETY: the array has four floats.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), _mm512_castps512_ps128(whole)) };
    out
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
