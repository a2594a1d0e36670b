//! Converts codes to floats.

use core::arch::x86_64::*;

// Kinds of codes. They are numbers because enums cannot be const parameters yet.
pub(super) const INT8: usize = 0;
pub(super) const E4M3: usize = 1;
pub(super) const E5M2: usize = 2;
pub(super) const E2M1: usize = 3;

/// Codes of each word that [`numbers`] converts at once.
pub(super) const PART: usize = 4;

/// Returns the number of codes in a word.
pub(super) const fn per_word<const CODES: usize>() -> usize {
    if CODES == E2M1 { 8 } else { 4 }
}

/// Returns the square root of the factor by which the floats of [`numbers`] are too small. Their
/// factors and their sums are multiplied by it.
pub(super) const fn root<const CODES: usize>() -> f32 {
    match CODES {
        // The exponents of f32, E4M3 and E5M2 have biases of 127, 7 and 15.
        E4M3 => f32::from_bits((127 + (127 - 7) / 2) << 23),
        E5M2 => f32::from_bits((127 + (127 - 15) / 2) << 23),
        _ => 1.0,
    }
}

/// Returns four codes of each word as floats: code `4 * part + i` in vector `i`. Only words of
/// eight codes have a part 1.
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
            // The instruction reads the low four bits of an index.
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

/// Returns the bytes of each word as floats. A byte's sign is its highest bit, and its exponent and
/// mantissa are in place after a right shift by `SHIFT`. Subnormal numbers become subnormal f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn floats<const SHIFT: u32>(words: __m512i, mask: u16) -> [__m512; PART] {
    let mask = _mm512_set1_epi16(mask as i16);
    let upper = _mm512_set1_epi32(0xffff_0000u32 as i32);
    // The upper halves of floats, two per word. The shift copies the sign and leaves it in place.
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
