//! Weighted sums of values. Lanes are words of codes, of one token or of several short tokens.

use core::arch::x86_64::*;

use super::{
    LANES, MAX_GROUPS, QUAD, Rows, Scaled,
    codes::{PART, numbers, per_word, root},
};
use crate::formats::flex::PackedRun;

/// Groups whose scales are multiplied by weights at a time.
const TILE: usize = 512;

/// Factors of the groups of a tile of tokens, for each row: weight times scale. They are padded, as
/// up to a quad may be read from the last factor on.
type Factors<const ROWS: usize> = [[f32; TILE + QUAD]; ROWS];

/// Computes [`add`](super::add) for `ROWS` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn add_rows<F: Scaled, const CODES: usize, const ROWS: usize>(
    values: &PackedRun<'_>,
    weights: &[f32],
    n: usize,
    o: &mut [f32],
) {
    let (tokens, rows) = (&values.tokens, Rows::new(values));
    let words = rows.width / size_of::<u32>();
    // Tokens that share a vector.
    let together = if LANES.is_multiple_of(words) { LANES / words } else { 1 };
    assert!(rows.groups <= MAX_GROUPS && words * per_word::<CODES>() == rows.head_dim);
    assert!(tokens.end * rows.width <= rows.codes.len());
    assert!(o.len() == ROWS * rows.head_dim);
    let tile = TILE / rows.groups / LANES * LANES;
    let mut scales = [0.0; TILE];
    let mut factors = [[0.0; TILE + QUAD]; ROWS];
    for first in (0..tokens.len()).step_by(tile) {
        let count = tile.min(tokens.len() - first);
        let start = tokens.start + first;
        let scales = &mut scales[..count * rows.groups];
        rows.scales::<F>(start, scales);
        scales.iter_mut().for_each(|scale| *scale *= root::<CODES>());
        for r in 0..ROWS {
            let weights = &weights[r * n + first..][..count];
            match rows.groups {
                1 => scaled::<1>(weights, scales, &mut factors[r]),
                2 => scaled::<2>(weights, scales, &mut factors[r]),
                4 => scaled::<4>(weights, scales, &mut factors[r]),
                8 => scaled::<8>(weights, scales, &mut factors[r]),
                groups => {
                    for (nth, scale) in scales.iter().enumerate() {
                        factors[r][nth] = weights[nth / groups] * scale;
                    }
                }
            }
        }
        for factors in &mut factors {
            factors[count * rows.groups..][..QUAD].fill(0.0);
        }
        for word in (0..words).step_by(LANES) {
            for part in 0..per_word::<CODES>() / PART {
                let run = Run { rows: &rows, start, count, together, words, word, part };
                match rows.group_words >= LANES {
                    // SAFETY: the slice has the tokens and the rows their channels, as asserted.
                    true => unsafe { run.add::<CODES, ROWS, false>(&factors, o) },
                    // SAFETY: as above.
                    false => unsafe { run.add::<CODES, ROWS, true>(&factors, o) },
                }
            }
        }
    }
}

/// Multiplies weights by the scales of their tokens' groups.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn scaled<const GROUPS: usize>(weights: &[f32], scales: &[f32], factors: &mut [f32]) {
    let groups = scales.as_chunks::<GROUPS>().0.iter();
    let factors = factors.as_chunks_mut::<GROUPS>().0.iter_mut();
    for ((factors, scales), weight) in factors.zip(groups).zip(weights) {
        for group in 0..GROUPS {
            factors[group] = weight * scales[group];
        }
    }
}

/// Consecutive tokens, and the words of them that a vector holds.
struct Run<'a> {
    rows: &'a Rows<'a>,
    /// The first token.
    start: usize,
    /// Number of tokens.
    count: usize,
    /// Tokens that share a vector.
    together: usize,
    /// Words of a token.
    words: usize,
    /// The first word of a token in the vector, for tokens of more words than lanes.
    word: usize,
    /// The part of each word's codes, as in [`numbers`].
    part: usize,
}

impl Run<'_> {
    /// Adds the products of the tokens with their factors to the rows of `o`. `SPLIT` is true if a
    /// vector may have words of several groups.
    ///
    /// # Safety
    /// The slice of codes must have the tokens, and each row of `o` their channels.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn add<const CODES: usize, const ROWS: usize, const SPLIT: bool>(
        &self,
        factors: &Factors<ROWS>,
        o: &mut [f32],
    ) {
        let Self { rows, start, count, together, words, word, part } = *self;
        // Words of each token in this vector.
        let taken = LANES.min(words - word);
        let first_group = word / rows.group_words;
        let mut groups = [0; LANES];
        for lane in 0..LANES {
            groups[lane] = ((word + lane) / rows.group_words - first_group).min(QUAD - 1) as i32;
        }
        // SAFETY: the array has 16 words.
        let groups = unsafe { _mm512_loadu_si512(groups.as_ptr().cast()) };
        let mut sums = [[_mm512_setzero_ps(); PART]; ROWS];
        for t in (0..count).step_by(together) {
            let at = (start + t) * rows.width + word * size_of::<u32>();
            let mask = u16::MAX >> (LANES - taken * together.min(count - t));
            if word == 0 {
                rows.prefetch(start + t, together);
            }
            debug_assert!(at + mask.count_ones() as usize * size_of::<u32>() <= rows.codes.len());
            // SAFETY: the slice has these tokens, and the mask excludes all words after them.
            let codes =
                unsafe { _mm512_maskz_loadu_epi32(mask, rows.codes.as_ptr().add(at).cast()) };
            let numbers = numbers::<CODES>(codes, part);
            for r in 0..ROWS {
                let factors = &factors[r][t * rows.groups + first_group..][..QUAD];
                let factor = match SPLIT {
                    // SAFETY: the slice has four floats.
                    true => unsafe {
                        let four = _mm512_broadcast_f32x4(_mm_loadu_ps(factors.as_ptr()));
                        _mm512_permutexvar_ps(groups, four)
                    },
                    false => _mm512_set1_ps(factors[0]),
                };
                for k in 0..PART {
                    sums[r][k] = _mm512_fmadd_ps(factor, numbers[k], sums[r][k]);
                }
            }
        }
        for r in 0..ROWS {
            let o = &mut o[r * rows.head_dim..][..rows.head_dim];
            for k in 0..PART {
                let mut lanes = [0.0; LANES];
                // SAFETY: the array has 16 floats.
                unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), sums[r][k]) };
                let channels = o[word * per_word::<CODES>() + part * PART + k..].iter_mut();
                for (i, o) in channels.step_by(per_word::<CODES>()).take(taken).enumerate() {
                    let tokens = (0..together).map(|token| lanes[token * words + i]);
                    *o += tokens.sum::<f32>() * root::<CODES>();
                }
            }
        }
    }
}
