//! Transposes of vectors of AVX-512.

use core::arch::x86_64::*;

/// Transposes 16 rows of 16 lanes of 32 bits.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn transpose(rows: [__m512i; 16]) -> [__m512i; 16] {
    // Pairs of rows, then of pairs, are joined within the four lanes of 128 bits.
    let mut pairs = rows;
    for i in (0..16).step_by(2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    let mut fours = pairs;
    for i in (0..16).step_by(4) {
        for half in 0..2 {
            let (a, b) = (pairs[i + half], pairs[i + half + 2]);
            fours[i + 2 * half] = _mm512_unpacklo_epi64(a, b);
            fours[i + 2 * half + 1] = _mm512_unpackhi_epi64(a, b);
        }
    }
    // `fours[4 * i + c]` has column `4 * lane + c` of the rows from `4 * i` on.
    let mut columns = rows;
    for c in 0..4 {
        let of_lanes = transpose_lanes([fours[c], fours[c + 4], fours[c + 8], fours[c + 12]]);
        for lane in 0..4 {
            columns[4 * lane + c] = of_lanes[lane];
        }
    }
    columns
}

/// Transposes four rows of four lanes of 128 bits.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn transpose_lanes([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let [low_ab, low_cd] = [_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0x44>(c, d)];
    let [high_ab, high_cd] =
        [_mm512_shuffle_i32x4::<0xee>(a, b), _mm512_shuffle_i32x4::<0xee>(c, d)];
    [
        _mm512_shuffle_i32x4::<0x88>(low_ab, low_cd),
        _mm512_shuffle_i32x4::<0xdd>(low_ab, low_cd),
        _mm512_shuffle_i32x4::<0x88>(high_ab, high_cd),
        _mm512_shuffle_i32x4::<0xdd>(high_ab, high_cd),
    ]
}
