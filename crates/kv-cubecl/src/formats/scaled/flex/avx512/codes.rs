//! Codes as floats.

use core::arch::x86_64::*;

/// What codes are, by which they become floats. Numbers of consts, as enums are no parameters of functions yet.
pub(super) const INT8: usize = 0;
pub(super) const E4M3: usize = 1;
pub(super) const E5M2: usize = 2;
pub(super) const E2M1: usize = 3;

/// Codes that [`numbers`] makes floats of at once, from each word.
pub(super) const PART: usize = 4;

/// Codes in a word.
pub(super) const fn per_word<const CODES: usize>() -> usize {
    if CODES == E2M1 { 8 } else { 4 }
}

/// Of what codes become in [`numbers`], floats are too small by the square of this: it is multiplied with what they
/// are multiplied with, and with their sums.
pub(super) const fn root<const CODES: usize>() -> f32 {
    match CODES {
        // An f32's exponent has a bias of 127, those of these codes 7 and 15.
        E4M3 => f32::from_bits((127 + (127 - 7) / 2) << 23),
        E5M2 => f32::from_bits((127 + (127 - 15) / 2) << 23),
        _ => 1.0,
    }
}

/// The first or, of words of eight codes, the second four codes of each word as floats: code `4 * part + i` in vector
/// `i`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn numbers<const CODES: usize>(words: __m512i, part: usize) -> [__m512; PART] {
    match CODES {
        E4M3 => floats::<4>(words, 0x87f0),
        E5M2 => floats::<3>(words, 0x8fe0),
        E2M1 => {
            let table = _mm512_setr_ps(
                0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0,
                -6.0,
            );
            let words = if part == 0 { words } else { _mm512_srli_epi32::<16>(words) };
            // Of an index four bits count.
            [
                _mm512_permutexvar_ps(words, table),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(words), table),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<8>(words), table),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<12>(words), table),
            ]
        }
        _ => [
            _mm512_slli_epi32::<24>(words),
            _mm512_slli_epi32::<16>(words),
            _mm512_slli_epi32::<8>(words),
            words,
        ]
        .map(|codes| _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(codes))),
    }
}

/// The bytes of each word as floats, whose sign is the highest bit, and whose exponent and mantissa are the others,
/// at their place after a shift by `SHIFT` to the right. Numbers below the normal ones are so of f32, too.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn floats<const SHIFT: u32>(words: __m512i, mask: u16) -> [__m512; PART] {
    let mask = _mm512_set1_epi16(mask as i16);
    let upper = _mm512_set1_epi32(0xffff_0000u32 as i32);
    // The upper halves of floats, two in each word. The shift copies the sign, and leaves it at its place.
    let even = _mm512_srai_epi16::<SHIFT>(_mm512_slli_epi16::<8>(words));
    let even = _mm512_and_si512(even, mask);
    let odd = _mm512_and_si512(_mm512_srai_epi16::<SHIFT>(words), mask);
    [
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(even)),
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(odd)),
        _mm512_castsi512_ps(_mm512_and_si512(even, upper)),
        _mm512_castsi512_ps(_mm512_and_si512(odd, upper)),
    ]
}
