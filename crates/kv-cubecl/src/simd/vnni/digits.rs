//! Rounds factors to integers, and writes them as signed digits to base 256.

use core::arch::x86_64::*;

use super::{DIGITS, LANES};

/// The integer that the largest factor of a row is scaled to. Its sum with [`ZERO`] is below
/// 2^23, also when rounded up.
const LARGEST: f32 = 0x3f_7f00 as f32;

/// The number that makes the bytes of an integer its signed digits: subtracting `ZERO` from
/// `x + ZERO` byte by byte, without borrowing, leaves three signed bytes whose value is x.
const ZERO: u32 = 0x40_8080;

/// The lower bound of a row's largest factor, so that the division by it does not overflow.
/// Factors below it are too small to change a softmax.
const SMALLEST: f32 = 1e-30;

/// Overwrites `N` rows of `n` factors, `stride` apart, with their digits. `largest` is the largest
/// magnitude of each row. Returns for each row the factor that the integer 1 stands for.
///
/// Four factors become four words: the four lowest digits, the four middle ones, the four highest,
/// and one word that is not read. Whole vectors are converted, so rows have room for them.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(crate) fn to_digits<const N: usize>(
    n: usize,
    largest: [f32; N],
    scaled: &mut [f32],
    stride: usize,
) -> [f32; N] {
    assert!((N - 1) * stride + n.next_multiple_of(LANES) <= scaled.len());
    let largest = largest.map(|largest| largest.max(SMALLEST));
    let per_unit = largest.map(|largest| LARGEST / largest);
    // A float of 2^23 or more has no bits for a fraction, so this addition rounds to an integer.
    let zero = _mm512_set1_ps(((1 << 23) + ZERO) as f32);
    let zero_digits = _mm512_set1_epi32(ZERO as i32);
    let by_digit = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let by_digit = _mm512_broadcast_i32x4(by_digit);
    for first in (0..n).step_by(LANES) {
        for row in 0..N {
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
pub(crate) const LARGER_MAGNITUDE: i32 = 0b1011;

/// Reduces each vector to one number, four at a time.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(crate) fn across<const N: usize>(
    rows: [__m512; N],
    with: impl Fn(__m512, __m512) -> __m512,
) -> [f32; N] {
    let mut out = [0.0; N];
    for (rows, out) in rows.chunks(4).zip(out.chunks_mut(4)) {
        let row = |i: usize| rows.get(i).copied().unwrap_or(rows[0]);
        out.copy_from_slice(&across_four([row(0), row(1), row(2), row(3)], &with)[..out.len()]);
    }
    out
}

#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn across_four(rows: [__m512; 4], with: impl Fn(__m512, __m512) -> __m512) -> [f32; 4] {
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

/// Returns the sums of factors from the sums of their digits, lowest first, in units.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(crate) fn join_digits([low, middle, high]: [__m512i; DIGITS]) -> __m512 {
    let base = _mm512_set1_ps(256.0);
    let upper = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), base, _mm512_cvtepi32_ps(middle));
    _mm512_fmadd_ps(upper, base, _mm512_cvtepi32_ps(low))
}

/// Returns the mask of the first `n` lanes.
#[inline(always)]
pub(crate) fn first_lanes(n: usize) -> u16 {
    u16::MAX >> LANES.saturating_sub(n)
}
