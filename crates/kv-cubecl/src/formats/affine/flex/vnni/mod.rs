//! Attention over packed tokens in integers, for processors that multiply bytes: AVX-512 with VNNI.
//!
//! Computes the sums of the kernels [in floating point](super) in fixed point: the factors of a
//! group (query or weight times scale) become [digits](crate::simd::vnni), and an instruction
//! multiplies the codes of four terms. Four terms take three instructions, one per digit; floating
//! point takes four. As in floating point, codes are masked but not shifted down in their byte.

mod codes;
mod fold;

use core::{arch::x86_64::*, mem};

use super::{
    codes::{CodeLayout, Terms},
    tile::{AddScratch, TILE, TILE_WORDS},
};
use crate::{
    formats::{QuantSpec, flex::SCRATCH_ROWS},
    simd::{
        self,
        vnni::{LANES, QUAD, available, to_digits},
    },
};
use codes::{Codes, load};
use fold::{Folded, fold};

/// Most query rows computed together: their sums and what multiplies them fit into 32 vector
/// registers. Each row takes two rows of scratch memory.
pub(super) const MAX_ROWS: usize = SCRATCH_ROWS / 2;

/// Returns whether this processor has the instructions and the kernels support the shape.
pub(super) fn serves(spec: &QuantSpec, head_dim: usize) -> bool {
    let line = Line::new(spec.words_of_codes(head_dim), head_dim / spec.group_size);
    available() && head_dim.is_multiple_of(LANES) && line.words * LANES <= TILE_WORDS
}

/// The sizes of one token's packed values: words of codes, then one parameter word per group.
struct Line {
    codes: usize,
    groups: usize,
    width: usize,
    /// `width` rounded up to a multiple of [`QUAD`].
    words: usize,
}

impl Line {
    const fn new(codes: usize, groups: usize) -> Self {
        let width = codes + groups;
        Self { codes, groups, width, words: width.next_multiple_of(QUAD) }
    }
}

/// Loads the first four words.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn load_quad(words: &[u32]) -> __m128i {
    assert!(words.len() >= QUAD);
    // SAFETY: the slice has at least four words.
    unsafe { _mm_loadu_si128(words.as_ptr().cast()) }
}

/// Joins four quads into one vector.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn join(quad: impl Fn(usize) -> __m128i) -> __m512i {
    let joined = _mm512_castsi128_si512(quad(0));
    let joined = _mm512_inserti32x4::<1>(joined, quad(1));
    let joined = _mm512_inserti32x4::<2>(joined, quad(2));
    _mm512_inserti32x4::<3>(joined, quad(3))
}

/// Computes [`score_rows`](super::sums::score_rows) in integers.
#[allow(clippy::too_many_arguments, reason = "slices of one problem")]
pub(super) fn score_rows<const BITS: usize, const ROWS: usize>(
    keys: &[u32],
    query: &[f32],
    scores: &mut [f32],
    n: usize,
    tokens: usize,
    head_dim: usize,
    group_size: usize,
    scratch: &mut [f32],
) {
    assert!(available());
    // SAFETY: the processor has the instructions that the function is compiled for, as asserted.
    unsafe {
        score::<BITS, ROWS>(keys, query, scores, n, tokens, head_dim, group_size, scratch);
    }
}

#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[allow(clippy::too_many_arguments, reason = "slices of one problem")]
fn score<const BITS: usize, const ROWS: usize>(
    keys: &[u32],
    query: &[f32],
    scores: &mut [f32],
    n: usize,
    tokens: usize,
    head_dim: usize,
    group_size: usize,
    scratch: &mut [f32],
) {
    let reader = Codes::<BITS>::new();
    let group_words = (CodeLayout::<BITS>::words(group_size) + 1) * head_dim;
    let n_groups = tokens.div_ceil(group_size);
    // Step `step` folds the factors of group `step`, then reads the codes of the group before. The
    // two are independent, so the processor can overlap them. That hides the latency of the largest
    // factor of a group, which its digits need.
    let (mut digits, mut scaled) = scratch.split_at_mut(MAX_ROWS * head_dim);
    let mut next = Folded { base: [0.0; ROWS], largest: [0.0; ROWS] };
    let mut unit = [0.0; ROWS];
    for step in 0..=n_groups {
        mem::swap(&mut digits, &mut scaled);
        let folded = next;
        if step > 0 {
            unit = to_digits::<ROWS>(head_dim, folded.largest, digits, head_dim);
        }
        if step < n_groups {
            let params = &keys[(step + 1) * group_words - head_dim..][..head_dim];
            let params = |i| load(&params[i..]);
            next = fold::<ROWS>(head_dim, params, query, head_dim, scaled, head_dim);
        }
        let Some(group) = step.checked_sub(1) else { continue };
        let words = &keys[group * group_words..][..group_words];
        let in_group = group_size.min(tokens - group * group_size);
        for first in (0..in_group).step_by(LANES) {
            // Prefetches the third group from this one, a share with each vector. The next group is
            // folded already, and the following one is about to be.
            let share = group_words * LANES / group_size;
            simd::prefetch(keys, (group + 3) * group_words + share * (first / LANES), share);
            let terms = Terms {
                words: &words[CodeLayout::<BITS>::low(first) * head_dim..],
                stride: QUAD,
                word_stride: head_dim,
                factors: digits,
                row_stride: head_dim,
                n: head_dim / QUAD,
            };
            let sums = reader.sums::<ROWS>(&terms, CodeLayout::<BITS>::high(first));
            for row in 0..ROWS {
                let scored = reader.restore(sums[row], unit[row], folded.base[row]);
                let wanted = LANES.min(in_group - first);
                let scores = &mut scores[row * n + group * group_size + first..][..wanted];
                store_part(scores, scored);
            }
        }
    }
}

/// Overwrites `x`, of at most 16 floats, with the first lanes of `vector`.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn store_part(x: &mut [f32], vector: __m512) {
    if let Some(x) = x.as_mut_array::<LANES>() {
        // SAFETY: the array has 16 floats.
        return unsafe { _mm512_storeu_ps(x.as_mut_ptr(), vector) };
    }
    // SAFETY: a vector and 16 floats have the same size and both allow any bits.
    let all: [f32; LANES] = unsafe { mem::transmute(vector) };
    x.copy_from_slice(&all[..x.len()]);
}

/// Computes [`add_rows`](super::sums::add_rows) in integers.
#[allow(clippy::too_many_arguments, reason = "slices of one problem")]
pub(super) fn add_rows<const BITS: usize, const ROWS: usize>(
    values: &[u32],
    tokens: usize,
    weights: &[f32],
    n: usize,
    o: &mut [f32],
    head_dim: usize,
    group_size: usize,
    scratch: &mut AddScratch,
) {
    assert!(available());
    // SAFETY: the processor has the instructions that the function is compiled for, as asserted.
    unsafe { add::<BITS, ROWS>(values, tokens, weights, n, o, head_dim, group_size, scratch) }
}

#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[allow(clippy::too_many_arguments, reason = "slices of one problem")]
fn add<const BITS: usize, const ROWS: usize>(
    values: &[u32],
    tokens: usize,
    weights: &[f32],
    n: usize,
    o: &mut [f32],
    head_dim: usize,
    group_size: usize,
    scratch: &mut AddScratch,
) {
    let reader = Codes::<BITS>::new();
    let line = Line::new(CodeLayout::<BITS>::words(head_dim), head_dim / group_size);
    let tile_len = (TILE_WORDS / line.words / LANES * LANES).clamp(LANES, TILE);
    let digits = scratch.folded.as_flattened_mut();
    for first in (0..tokens).step_by(tile_len) {
        let count = tile_len.min(tokens - first);
        let quads = &mut scratch.words[..count.next_multiple_of(LANES) * line.words];
        transpose(&values[first * line.width..], line.width, quads);
        for group in 0..line.groups {
            // The parameter words of 16 tokens lie in four quads of lines.
            let params = |token: usize| {
                let stride = QUAD * line.words;
                let all = &quads[token * line.words + (line.codes + group) * QUAD..];
                let all = &all[..3 * stride + QUAD];
                join(|i| load_quad(&all[i * stride..]))
            };
            let folded = fold::<ROWS>(count, params, &weights[first..], n, digits, TILE);
            let unit = to_digits::<ROWS>(count, folded.largest, digits, TILE);
            for channel in (group * group_size..(group + 1) * group_size).step_by(LANES) {
                let share = tile_len * line.width * LANES / head_dim;
                let next = (first + tile_len) * line.width;
                simd::prefetch(values, next + share * (channel / LANES), share);
                let terms = Terms {
                    words: &quads[CodeLayout::<BITS>::low(channel) * QUAD..],
                    stride: line.words * QUAD,
                    word_stride: QUAD,
                    factors: digits,
                    row_stride: TILE,
                    n: count.div_ceil(QUAD),
                };
                let sums = reader.sums::<ROWS>(&terms, CodeLayout::<BITS>::high(channel));
                for row in 0..ROWS {
                    let added = reader.restore(sums[row], unit[row], folded.base[row]);
                    let o = &mut o[row * head_dim + channel..][..LANES];
                    let sum = _mm512_add_ps(_mm512_castsi512_ps(load(o)), added);
                    store_part(o, sum);
                }
            }
        }
    }
}

/// Transposes lines of `width` words, four lines at a time.
///
/// Each quad of lines becomes its four first words, then its four second words, and so on, padded
/// to a multiple of four words. Lines that are missing in `lines` are zeros.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn transpose(lines: &[u32], width: usize, quads: &mut [u32]) {
    let words = width.next_multiple_of(QUAD);
    let by_word = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (quad, out) in quads.chunks_exact_mut(words * QUAD).enumerate() {
        let first = quad * QUAD * width;
        // The loop below reads whole quads of words, which may extend into the next line. Words
        // are copied one by one where that would leave the slice.
        if first + (QUAD - 1) * width + words > lines.len() {
            for (i, out) in out.iter_mut().enumerate() {
                *out = lines.get(first + i % QUAD * width + i / QUAD).copied().unwrap_or(0);
            }
            continue;
        }
        for (i, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            // SAFETY: all loads are within `lines`, as checked above, and `out` has 16 words.
            unsafe {
                let from = lines.as_ptr().add(first + i * QUAD);
                let four = join(|line| _mm_loadu_si128(from.add(line * width).cast()));
                let four = _mm512_permutexvar_epi32(by_word, four);
                _mm512_storeu_si512(out.as_mut_ptr().cast(), four)
            };
        }
    }
}
