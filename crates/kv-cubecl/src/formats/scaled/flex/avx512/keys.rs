//! Scores of keys. Lanes are tokens.

use core::arch::x86_64::*;

use super::{
    LANES, QUAD, Rows, Scaled,
    codes::{PART, numbers, per_word, root},
};
use crate::formats::flex::PackedRun;

/// Computes [`score`](super::score) for `ROWS` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn score_rows<F: Scaled, const CODES: usize, const ROWS: usize>(
    keys: &PackedRun<'_>,
    query: &[f32],
    scores: &mut [f32],
    n: usize,
    scratch: &mut [f32],
) {
    let (tokens, rows) = (&keys.tokens, Rows::new(keys));
    let head_dim = rows.head_dim;
    let query = &query[..ROWS * head_dim];
    let scaled = &mut scratch[..query.len()];
    scaled.iter_mut().zip(query).for_each(|(scaled, x)| *scaled = x * root::<CODES>());
    let query = &*scaled;
    assert!(tokens.end <= keys.place.tokens && keys.place.tokens >= LANES);
    assert!(keys.place.tokens * rows.width == rows.codes.len());
    assert!(rows.groups * rows.group_words * per_word::<CODES>() == head_dim);
    let root = _mm512_set1_ps(root::<CODES>());
    for first in (0..tokens.len()).step_by(LANES) {
        let wanted = LANES.min(tokens.len() - first);
        // A vector that would extend past the slice begins earlier, and drops the first scores.
        let slot = (tokens.start + first).min(keys.place.tokens - LANES);
        let others = tokens.start + first - slot;
        rows.prefetch(slot, LANES);
        let mut totals = [_mm512_setzero_ps(); ROWS];
        for group in 0..rows.groups {
            let mut sums = [[_mm512_setzero_ps(); PART]; ROWS];
            let words = group * rows.group_words;
            for word in (words..words + rows.group_words).step_by(QUAD) {
                // SAFETY: rows are whole quads of words, and are in the slice as asserted.
                let quad = unsafe { transposed(&rows, slot, word) };
                for i in 0..QUAD {
                    for part in 0..per_word::<CODES>() / PART {
                        let channel = (word + i) * per_word::<CODES>() + part * PART;
                        let numbers = numbers::<CODES>(quad[i], part);
                        for k in 0..PART {
                            for r in 0..ROWS {
                                // SAFETY: a row of the query has as many channels as its words have
                                // codes, as asserted.
                                let query =
                                    unsafe { *query.get_unchecked(r * head_dim + channel + k) };
                                sums[r][k] =
                                    _mm512_fmadd_ps(_mm512_set1_ps(query), numbers[k], sums[r][k]);
                            }
                        }
                    }
                }
            }
            let scales = scales::<F>(&rows, slot, group);
            for r in 0..ROWS {
                let [a, b, c, d] = sums[r];
                let sum = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
                totals[r] = _mm512_fmadd_ps(_mm512_mul_ps(sum, root), scales, totals[r]);
            }
        }
        for r in 0..ROWS {
            store(&mut scores[r * n + first..][..wanted], others, totals[r]);
        }
    }
}

/// Overwrites `x`, of at most 16 floats, with the lanes of `vector` from `first` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn store(x: &mut [f32], first: usize, vector: __m512) {
    if let Some(x) = x.as_mut_array::<LANES>() {
        // SAFETY: the array has 16 floats.
        return unsafe { _mm512_storeu_ps(x.as_mut_ptr(), vector) };
    }
    let mut all = [0.0; LANES];
    // SAFETY: the array has 16 floats.
    unsafe { _mm512_storeu_ps(all.as_mut_ptr(), vector) };
    x.copy_from_slice(&all[first..][..x.len()]);
}

/// Returns the scales of one group of 16 tokens, from a slot on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn scales<F: Scaled>(rows: &Rows<'_>, slot: usize, group: usize) -> __m512 {
    let mut scales = [0.0; LANES];
    for lane in 0..LANES {
        scales[lane] = rows.scale::<F>(slot + lane, group);
    }
    // SAFETY: the array has 16 floats.
    unsafe { _mm512_loadu_ps(scales.as_ptr()) }
}

/// Loads four words, from `word` on, of each of 16 tokens, from a slot on. Returns a vector of the
/// first words of all tokens, one of the second words, and so on.
///
/// # Safety
/// The tokens and words must be in the slice of codes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn transposed(rows: &Rows<'_>, slot: usize, word: usize) -> [__m512i; QUAD] {
    let (codes, width) = (rows.codes, rows.width);
    let first = slot * width + word * size_of::<u32>();
    let mut four = [_mm512_setzero_si512(); QUAD];
    for i in 0..QUAD {
        let words = |token: usize| {
            let start = first + token * width;
            debug_assert!(start + size_of::<__m128i>() <= codes.len());
            // SAFETY: the slice has these bytes, as the caller guarantees.
            unsafe { _mm_loadu_si128(codes.as_ptr().add(start).cast()) }
        };
        // Joins tokens that are four apart, because unpacking then brings neighbors together.
        let joined = _mm512_castsi128_si512(words(i));
        let joined = _mm512_inserti32x4::<1>(joined, words(4 + i));
        let joined = _mm512_inserti32x4::<2>(joined, words(8 + i));
        four[i] = _mm512_inserti32x4::<3>(joined, words(12 + i));
    }
    let [a, b, c, d] = four;
    let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
    let (ab_high, cd_high) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
    [
        _mm512_unpacklo_epi64(ab, cd),
        _mm512_unpackhi_epi64(ab, cd),
        _mm512_unpacklo_epi64(ab_high, cd_high),
        _mm512_unpackhi_epi64(ab_high, cd_high),
    ]
}
