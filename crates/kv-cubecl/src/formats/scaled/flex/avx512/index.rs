//! Scores of an indexer's keys: products with many heads, ReLU and the weighted sum over heads.
//!
//! Lanes are keys. The codes of 16 keys are unpacked once for all heads: E2M1 codes to bytes, for
//! VNNI's products of bytes, and E4M3 codes to bf16. Queries are split into one or two digits, hi +
//! lo, of these types. A query that was rounded to 4-bit floats before, as in DeepSeek's models,
//! has one digit and is exact.

use core::arch::x86_64::*;

use super::{
    LANES, QUAD, Rows, Scaled,
    codes::{PART, numbers, per_word, root},
    keys::{scales, store, transposed},
};
use crate::formats::{
    Codec,
    flex::{IndexHeads, PackedRun},
    scaled::flex::avx512::codes::{E2M1, E4M3},
};

/// Heads whose sums are in registers together.
const HEADS: usize = 8;

/// Channels whose products are summed before the scale. Groups of the keys that are served are
/// multiples.
const GROUP: usize = 32;

/// The most channels of a key.
const WIDEST: usize = 256;

/// Returns whether this processor has the instructions, and the keys are in a format that the
/// kernels support.
fn serves(keys: &PackedRun<'_>, format: Codec) -> bool {
    let place = &keys.place;
    super::serves(place)
        && place.spec.group_size.is_multiple_of(GROUP)
        && place.head_dim <= WIDEST
        && place.tokens >= LANES
        && match format {
            Codec::E2m1Blocks | Codec::Mxfp4 => is_x86_feature_detected!("avx512vnni"),
            Codec::E4m3Blocks => is_x86_feature_detected!("avx512bf16"),
            _ => false,
        }
}

/// Computes [`CpuCodec::index_scores`](crate::formats::flex::CpuCodec::index_scores). Returns
/// false, without computing it, if the kernels do not support the keys or the heads.
pub(super) fn index_scores<F: Scaled>(
    keys: &PackedRun<'_>,
    heads: &IndexHeads<'_>,
    scores: &mut [f32],
) -> bool {
    let rows = Rows::new(keys);
    if !serves(keys, F::FORMAT)
        || !super::moderate(heads.query)
        || !rows.scales_are_moderate::<F>(keys)
    {
        return false;
    }
    match F::FORMAT {
        Codec::E4m3Blocks => {
            let digits = Digits::bf16(heads, rows.head_dim);
            // SAFETY: `serves` has checked that the processor has the instructions.
            unsafe {
                match digits.n {
                    1 => score_bf16::<F, 1>(keys, heads, &digits, scores),
                    _ => score_bf16::<F, 2>(keys, heads, &digits, scores),
                }
            }
        }
        _ => {
            let digits = Digits::bytes(heads, rows.head_dim);
            // SAFETY: `serves` has checked that the processor has the instructions.
            unsafe {
                match digits.n {
                    1 => score_bytes::<F, 1>(keys, heads, &digits, scores),
                    _ => score_bytes::<F, 2>(keys, heads, &digits, scores),
                }
            }
        }
    }
    true
}

/// The queries of all heads as words that are multiplied with the words of a key, padded with zeros
/// to whole [`HEADS`].
struct Digits {
    /// Digits of a query: 1, or 2 if one is not exact.
    n: usize,
    /// By head, digit and word of a key.
    words: Vec<i32>,
    /// Words of a key.
    key_words: usize,
    /// By head and group: the size of a unit of the first digit.
    units: Vec<f32>,
    /// By head, digit and group: minus the offset of the key's bytes times the sum of the digits.
    offsets: Vec<i32>,
}

/// The number that makes the byte of a key positive: twice the largest E2M1 number.
const OFFSET: i32 = 12;

/// The units of the second digit in one of the first.
const FINER: f32 = 128.0;

impl Digits {
    fn new(heads: &IndexHeads<'_>, width: usize, per_word: usize) -> Self {
        let n_heads = heads.weights.len().next_multiple_of(HEADS);
        let (key_words, groups) = (width / per_word, width / GROUP);
        Self {
            n: 1,
            words: vec![0; n_heads * 2 * key_words],
            key_words,
            units: vec![0.0; n_heads * groups],
            offsets: vec![0; n_heads * 2 * groups],
        }
    }

    /// Splits queries into bytes with a power of two as unit of each group. Word `2 i + j` of a key
    /// has the channels `8 i + j`, `+ 2`, `+ 4` and `+ 6`.
    fn bytes(heads: &IndexHeads<'_>, width: usize) -> Self {
        let mut digits = Self::new(heads, width, 4);
        let (words, groups) = (digits.key_words, width / GROUP);
        for (head, query) in heads.query.chunks_exact(width).enumerate() {
            for (group, x) in query.chunks_exact(GROUP).enumerate() {
                let amax = x.iter().fold(0.0f32, |amax, x| amax.max(x.abs()));
                if amax == 0.0 {
                    continue;
                }
                // The smallest power of two at which all digits are at most 127.
                let mut unit = f32::from_bits((amax / 127.0).to_bits() & 0x7f80_0000);
                if amax > 127.0 * unit {
                    unit *= 2.0;
                }
                if unit == 0.0 {
                    continue;
                }
                // A code stands for half its byte.
                digits.units[head * groups + group] = unit / 2.0;
                for (i, &x) in x.iter().enumerate() {
                    let steps = x / unit;
                    let hi = steps.round_ties_even();
                    let lo = ((steps - hi) * FINER).round_ties_even();
                    digits.n = if lo == 0.0 { digits.n } else { 2 };
                    let channel = group * GROUP + i;
                    let word = channel / 8 * 2 + channel % 2;
                    let shift = channel % 8 / 2 * 8;
                    for (digit, x) in [hi, lo].into_iter().enumerate() {
                        let (at, byte) = ((head * 2 + digit) * words + word, x as i32 & 0xff);
                        digits.words[at] |= byte << shift;
                        digits.offsets[(head * 2 + digit) * groups + group] -= OFFSET * x as i32;
                    }
                }
            }
        }
        digits
    }

    /// Splits queries into bf16. Word `i` of a key has the channels `2 i` and `2 i + 1`.
    fn bf16(heads: &IndexHeads<'_>, width: usize) -> Self {
        let mut digits = Self::new(heads, width, 2);
        let words = digits.key_words;
        for (head, query) in heads.query.chunks_exact(width).enumerate() {
            for (channel, &x) in query.iter().enumerate() {
                let hi = half::bf16::from_f32(x);
                let lo = half::bf16::from_f32(x - hi.to_f32());
                digits.n = if lo.to_f32() == 0.0 { digits.n } else { 2 };
                for (digit, x) in [hi, lo].into_iter().enumerate() {
                    let at = (head * 2 + digit) * words + channel / 2;
                    digits.words[at] |= i32::from(x.to_bits()) << (channel % 2 * 16);
                }
            }
        }
        digits
    }
}

/// Calls `score` with each run of 16 keys, its scales and the lanes to drop, and stores the scores.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn for_each_run(
    keys: &PackedRun<'_>,
    scores: &mut [f32],
    mut score: impl FnMut(&Rows<'_>, usize) -> __m512,
) {
    let (tokens, rows) = (&keys.tokens, Rows::new(keys));
    assert!(tokens.end <= keys.place.tokens && keys.place.tokens >= LANES);
    assert!(keys.place.tokens * rows.width == rows.codes.len());
    for first in (0..tokens.len()).step_by(LANES) {
        let wanted = LANES.min(tokens.len() - first);
        // A vector that would extend past the slice begins earlier, and drops the first scores.
        let slot = (tokens.start + first).min(keys.place.tokens - LANES);
        rows.prefetch(slot, LANES);
        let others = tokens.start + first - slot;
        store(&mut scores[first..][..wanted], others, score(&rows, slot));
    }
}

/// Adds the scores of heads that are above 0, times their weights.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn weighed(total: __m512, weights: __m512, sum: __m512) -> __m512 {
    // The second operand is returned if one is NaN, so that NaN stays NaN.
    let positive = _mm512_max_ps(_mm512_setzero_ps(), total);
    _mm512_fmadd_ps(positive, weights, sum)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn score_bytes<F: Scaled, const DIGITS: usize>(
    keys: &PackedRun<'_>,
    heads: &IndexHeads<'_>,
    digits: &Digits,
    scores: &mut [f32],
) {
    /// Words of codes of a group.
    const CODE_WORDS: usize = GROUP / 8;
    let groups = keys.place.head_dim / GROUP;
    let table = _mm512_broadcast_i32x4(_mm_setr_epi8(
        12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
    ));
    let nibbles = _mm512_set1_epi8(15);
    let mut bytes = [_mm512_setzero_si512(); WIDEST / 4];
    let mut steps = [_mm512_setzero_ps(); WIDEST / GROUP];
    for_each_run(keys, scores, |rows, slot| {
        for group in 0..groups {
            steps[group] = scales::<F>(rows, slot, group * GROUP / keys.place.spec.group_size);
            // SAFETY: a group has four words, and the run is in the slice.
            let quad = unsafe { transposed(rows, slot, group * CODE_WORDS) };
            for i in 0..QUAD {
                let (even, odd) = (quad[i], _mm512_srli_epi32::<4>(quad[i]));
                let at = (group * CODE_WORDS + i) * 2;
                bytes[at] = _mm512_shuffle_epi8(table, _mm512_and_si512(even, nibbles));
                bytes[at + 1] = _mm512_shuffle_epi8(table, _mm512_and_si512(odd, nibbles));
            }
        }
        let mut sum = _mm512_setzero_ps();
        for first in (0..heads.weights.len()).step_by(HEADS) {
            let mut totals = [_mm512_setzero_ps(); HEADS];
            for group in 0..groups {
                let mut sums = [[_mm512_setzero_si512(); DIGITS]; HEADS];
                for h in 0..HEADS {
                    for d in 0..DIGITS {
                        let at = ((first + h) * 2 + d) * groups + group;
                        sums[h][d] = _mm512_set1_epi32(digits.offsets[at]);
                    }
                }
                for word in group * CODE_WORDS * 2..(group + 1) * CODE_WORDS * 2 {
                    let bytes = bytes[word];
                    for h in 0..HEADS {
                        for d in 0..DIGITS {
                            let at = ((first + h) * 2 + d) * digits.key_words + word;
                            debug_assert!(at < digits.words.len());
                            // SAFETY: heads are padded to whole runs, and `word` is below
                            // `key_words`.
                            let query = unsafe { *digits.words.get_unchecked(at) };
                            sums[h][d] =
                                _mm512_dpbusd_epi32(sums[h][d], bytes, _mm512_set1_epi32(query));
                        }
                    }
                }
                for h in 0..HEADS {
                    let mut dot = _mm512_cvtepi32_ps(sums[h][0]);
                    if DIGITS == 2 {
                        let finer = _mm512_cvtepi32_ps(sums[h][DIGITS - 1]);
                        dot = _mm512_fmadd_ps(finer, _mm512_set1_ps(1.0 / FINER), dot);
                    }
                    let unit = _mm512_set1_ps(digits.units[(first + h) * groups + group]);
                    totals[h] = _mm512_fmadd_ps(_mm512_mul_ps(dot, unit), steps[group], totals[h]);
                }
            }
            for (h, weight) in heads.weights[first..].iter().take(HEADS).enumerate() {
                sum = weighed(totals[h], _mm512_set1_ps(*weight), sum);
            }
        }
        sum
    });
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn score_bf16<F: Scaled, const DIGITS: usize>(
    keys: &PackedRun<'_>,
    heads: &IndexHeads<'_>,
    digits: &Digits,
    scores: &mut [f32],
) {
    /// Words of codes of a group.
    const CODE_WORDS: usize = GROUP / 4;
    let groups = keys.place.head_dim / GROUP;
    let factor = _mm512_set1_ps(root::<E4M3>() * root::<E4M3>());
    let upper = _mm512_set1_epi32(0xffff_0000u32 as i32);
    let mut pairs = [_mm512_setzero_si512(); WIDEST / 2];
    let mut steps = [_mm512_setzero_ps(); WIDEST / GROUP];
    for_each_run(keys, scores, |rows, slot| {
        for group in 0..groups {
            steps[group] = scales::<F>(rows, slot, group * GROUP / keys.place.spec.group_size);
            for quad in (0..CODE_WORDS).step_by(QUAD) {
                // SAFETY: a group is whole quads of words, and the run is in the slice.
                let words = unsafe { transposed(rows, slot, group * CODE_WORDS + quad) };
                for i in 0..QUAD {
                    // Exact: bf16 has more exponents and more digits than E4M3.
                    let numbers = numbers::<E4M3>(words[i], 0)
                        .map(|x| _mm512_castps_si512(_mm512_mul_ps(x, factor)));
                    let pair = |low, high| {
                        let low = _mm512_srli_epi32::<16>(low);
                        _mm512_or_si512(low, _mm512_and_si512(high, upper))
                    };
                    let at = (group * CODE_WORDS + quad + i) * 2;
                    pairs[at] = pair(numbers[0], numbers[1]);
                    pairs[at + 1] = pair(numbers[2], numbers[3]);
                }
            }
        }
        let mut sum = _mm512_setzero_ps();
        for first in (0..heads.weights.len()).step_by(HEADS) {
            let mut totals = [_mm512_setzero_ps(); HEADS];
            for group in 0..groups {
                let mut sums = [_mm512_setzero_ps(); HEADS];
                for word in group * CODE_WORDS * 2..(group + 1) * CODE_WORDS * 2 {
                    // SAFETY: both types are 64 bytes without invalid values.
                    let pair: __m512bh = unsafe { core::mem::transmute(pairs[word]) };
                    for h in 0..HEADS {
                        for d in 0..DIGITS {
                            let at = ((first + h) * 2 + d) * digits.key_words + word;
                            debug_assert!(at < digits.words.len());
                            // SAFETY: heads are padded to whole runs, and `word` is below
                            // `key_words`.
                            let query = unsafe { *digits.words.get_unchecked(at) };
                            // SAFETY: as for `pair`.
                            let query: __m512bh =
                                unsafe { core::mem::transmute(_mm512_set1_epi32(query)) };
                            sums[h] = _mm512_dpbf16_ps(sums[h], pair, query);
                        }
                    }
                }
                for h in 0..HEADS {
                    totals[h] = _mm512_fmadd_ps(sums[h], steps[group], totals[h]);
                }
            }
            for (h, weight) in heads.weights[first..].iter().take(HEADS).enumerate() {
                sum = weighed(totals[h], _mm512_set1_ps(*weight), sum);
            }
        }
        sum
    });
}

const _: () = assert!(per_word::<E2M1>() == 8 && per_word::<E4M3>() == PART);
