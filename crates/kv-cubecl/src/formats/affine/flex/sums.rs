//! Attention over packed tokens, without restoring them.
//!
//! Scale and minimum stay outside the loops over codes. Those of keys are folded into the query
//! once per group, those of values into the attention weights once per token and group. One
//! multiplication and addition per code and query row is left.
//!
//! To read codes, a u32 word is copied to every lane of a vector and each lane masks its own code.
//! The code is not shifted down: it stays 2^k times too large, where k is its bit offset in the
//! word. Every lane always reads the same offset, so a sum is divided by 2^k once, at its end.
//!
//! Processors with AVX-512 VNNI use the integer version of these kernels, [`vnni`].

use macerator::{Scalar, Simd};

#[cfg(target_arch = "x86_64")]
use super::vnni;
use super::{
    codes::{CodeLayout, Codes, Terms},
    parameters::{unpack_parameters, unpack_vector},
    tile::{AddScratch, MAX_ROWS, TILE, TILE_WORDS},
    widen::{RUN, WHOLE_WORDS, WIDENED, widen_columns, widen_lines, widened},
};
use crate::{
    formats::flex::{MANY_ROWS, PackedRun},
    layout::PackedLayout,
    simd::{self, load, store, store_part},
};

/// Selects the instance of a function that is generic over bits of a code and query rows, one of
/// the numbers given.
macro_rules! by_shape {
    ($name:ident, $spec:expr, $rows:expr, $numbers:tt) => {
        match $spec.n_bits {
            2 => by_shape!(@rows $name, 2, $rows, $numbers),
            3 => by_shape!(@rows $name, 3, $rows, $numbers),
            4 => by_shape!(@rows $name, 4, $rows, $numbers),
            _ => by_shape!(@rows $name, 8, $rows, $numbers),
        }
    };
    (@rows $name:ident, $bits:literal, $rows:expr, [$($number:literal)*]) => {
        match $rows {
            $($number => $name::<$bits, $number>,)*
            rows => unreachable!("{rows} rows at once"),
        }
    };
}

/// Selects the kernel for a shape: the integer version if it supports the processor and the shape.
macro_rules! kernel {
    ($name:ident, $spec:expr, $rows:expr, $head_dim:expr) => {{
        #[cfg(not(target_arch = "x86_64"))]
        let kernel = by_shape!($name, $spec, $rows, [1 2 3 4]);
        #[cfg(target_arch = "x86_64")]
        let kernel = match vnni::serves(&$spec, $head_dim) {
            true => {
                use vnni::$name as in_integers;
                by_shape!(in_integers, $spec, $rows, [1 2 3 4 5 6 7 8])
            }
            false => by_shape!($name, $spec, $rows, [1 2 3 4]),
        };
        kernel
    }};
}

/// Returns [`many_rows`](crate::formats::flex::CpuCodec::many_rows). Products with integers take
/// 0.8 of the time of restored tokens for 36 rows.
pub(super) fn many_rows(place: &PackedLayout) -> usize {
    #[cfg(target_arch = "x86_64")]
    if vnni::serves(&place.spec, place.head_dim) {
        return 64;
    }
    MANY_ROWS
}

/// Splits `rows` into runs that are computed together, each as first row and length.
fn runs(rows: usize, place: &PackedLayout) -> impl Iterator<Item = (usize, usize)> {
    #[cfg(target_arch = "x86_64")]
    let most = if vnni::serves(&place.spec, place.head_dim) { vnni::MAX_ROWS } else { MAX_ROWS };
    #[cfg(not(target_arch = "x86_64"))]
    let most = MAX_ROWS;
    (0..rows).step_by(most).map(move |first| (first, most.min(rows - first)))
}

/// Computes `scores[r * n + t] = query_r . key_t` of the packed keys, which start at a group.
pub(super) fn score(
    keys: &PackedRun<'_>,
    query: &[f32],
    scores: &mut [f32],
    n: usize,
    scratch: &mut [f32],
) {
    let PackedRun { words, ref place, ref tokens, .. } = *keys;
    let words = &words[place.spec.words(tokens.start, place.head_dim)..];
    score_words(words, place, tokens.len(), query, scores, n, scratch);
}

/// Computes [`score`] of `tokens` keys whose groups begin with `words`.
pub(in crate::formats) fn score_words(
    words: &[u32],
    place: &PackedLayout,
    tokens: usize,
    query: &[f32],
    scores: &mut [f32],
    n: usize,
    scratch: &mut [f32],
) {
    let PackedLayout { spec, head_dim, .. } = *place;
    for (row, rows) in runs(query.len() / head_dim, place) {
        let query = &query[row * head_dim..][..rows * head_dim];
        let kernel = kernel!(score_rows, spec, rows, head_dim);
        let (scores, group_size) = (&mut scores[row * n..], spec.group_size);
        kernel(words, query, scores, n, tokens, head_dim, group_size, scratch);
    }
}

/// Computes `o_r += sum_t weights[r * n + t] * value_t` of the packed values.
pub(super) fn add(values: &PackedRun<'_>, weights: &[f32], n: usize, o: &mut [f32]) {
    let PackedRun { words, ref place, ref tokens, .. } = *values;
    let words = &words[place.spec.words(tokens.start, place.head_dim)..];
    add_words(words, place, tokens.len(), weights, n, o, &mut AddScratch::default());
}

/// Computes [`add`] of `tokens` values whose lines begin with `words`. What follows them is
/// prefetched.
pub(in crate::formats) fn add_words(
    words: &[u32],
    place: &PackedLayout,
    tokens: usize,
    weights: &[f32],
    n: usize,
    o: &mut [f32],
    scratch: &mut AddScratch,
) {
    let PackedLayout { spec, head_dim, .. } = *place;
    for (row, rows) in runs(o.len() / head_dim, place) {
        let o = &mut o[row * head_dim..][..rows * head_dim];
        let kernel = kernel!(add_rows, spec, rows, head_dim);
        kernel(words, tokens, &weights[row * n..], n, o, head_dim, spec.group_size, scratch);
    }
}

/// Folds scales into factors: multiplies `ROWS` rows of `factors` (`stride` apart) by the scales in
/// the parameter words `params`, and writes them to `folded` (rows `folded_stride` apart).
///
/// Returns for each row the sum of factors times minima, and the sum of the folded factors.
#[inline(always)]
fn fold<S: Simd, const ROWS: usize>(
    params: &[u32],
    factors: &[f32],
    stride: usize,
    folded: &mut [f32],
    folded_stride: usize,
) -> ([f32; ROWS], [f32; ROWS]) {
    let lanes = u32::lanes::<S>();
    let whole = params.len() / lanes * lanes;
    let mut sums = [[0.0f32.splat::<S>(); ROWS]; 2];
    for first in (0..whole).step_by(lanes) {
        let (scale, min) = unpack_vector::<S>(load(&params[first..]));
        for r in 0..ROWS {
            let factor = load::<S, f32>(&factors[r * stride + first..]);
            let scaled = factor * scale;
            store(&mut folded[r * folded_stride + first..], scaled);
            sums[0][r] = factor.mul_add(min, sums[0][r]);
            sums[1][r] += scaled;
        }
    }
    let (mut base, mut total) = ([0.0; ROWS], [0.0; ROWS]);
    for r in 0..ROWS {
        base[r] = sums[0][r].reduce_add();
        total[r] = sums[1][r].reduce_add();
    }
    for (i, &word) in params.iter().enumerate().skip(whole) {
        let (scale, min) = unpack_parameters(word);
        for r in 0..ROWS {
            let factor = factors[r * stride + i];
            folded[r * folded_stride + i] = factor * scale;
            base[r] += factor * min;
            total[r] += factor * scale;
        }
    }
    (base, total)
}

/// Computes [`score`] for `ROWS` rows and `tokens` tokens. Lanes are tokens, so no sum across lanes
/// is needed.
#[macerator::with_simd]
#[allow(clippy::too_many_arguments, reason = "slices of one problem")]
pub(super) fn score_rows<S: Simd, const BITS: usize, const ROWS: usize>(
    keys: &[u32],
    query: &[f32],
    scores: &mut [f32],
    n: usize,
    tokens: usize,
    head_dim: usize,
    group_size: usize,
    scratch: &mut [f32],
) {
    let lanes = u32::lanes::<S>();
    let group_words = (CodeLayout::<BITS>::words(group_size) + 1) * head_dim;
    for (group, words) in
        keys.chunks_exact(group_words).take(tokens.div_ceil(group_size)).enumerate()
    {
        let (codes, params) = words.split_at(group_words - head_dim);
        let (folded, wide) = scratch.split_at_mut(MAX_ROWS * head_dim);
        let (base, factors) = fold::<S, ROWS>(params, query, head_dim, folded, head_dim);
        let wide: &mut [u32] = bytemuck::cast_slice_mut(wide);
        let in_group = group_size.min(tokens - group * group_size);
        for first in (0..in_group).step_by(lanes) {
            // Prefetches the next group: a share of it with each vector of this one.
            let share = group_words * lanes / group_size;
            simd::prefetch(keys, (group + 1) * group_words + share * (first / lanes), share);
            let reader = Codes::<S, BITS>::at(first);
            let (words, stride, word_stride) = match CodeLayout::<BITS>::SPLIT {
                true => {
                    if first % RUN == 0 {
                        let words = &codes[CodeLayout::<BITS>::low(first) * head_dim..];
                        widen_columns(words, head_dim, wide);
                    }
                    (&wide[first % RUN / WIDENED..], WHOLE_WORDS, 1)
                }
                false => (&codes[first / Codes::<S, BITS>::CODES * head_dim..], 1, head_dim),
            };
            let sums = reader.sums::<ROWS>(&Terms {
                words,
                stride,
                word_stride,
                factors: folded,
                row_stride: head_dim,
                n: head_dim,
            });
            for r in 0..ROWS {
                let scored = reader.restore(sums[r], factors[r], base[r]);
                let wanted = lanes.min(in_group - first);
                store_part(&mut scores[r * n + group * group_size + first..][..wanted], scored);
            }
        }
    }
}

/// Computes [`add`] for `ROWS` rows. Lanes are channels.
#[macerator::with_simd]
#[allow(clippy::too_many_arguments, reason = "slices of one problem")]
pub(super) fn add_rows<S: Simd, const BITS: usize, const ROWS: usize>(
    values: &[u32],
    tokens: usize,
    weights: &[f32],
    n: usize,
    o: &mut [f32],
    head_dim: usize,
    group_size: usize,
    scratch: &mut AddScratch,
) {
    let lanes = u32::lanes::<S>();
    let (n_words, groups) = (CodeLayout::<BITS>::words(head_dim), head_dim / group_size);
    let width = n_words + groups;
    let tile_len = (TILE_WORDS / width / lanes * lanes).clamp(lanes, TILE);
    let AddScratch { words: wide, params, folded } = scratch;
    for first in (0..tokens).step_by(tile_len) {
        let count = tile_len.min(tokens - first);
        let lines = &values[first * width..][..count * width];
        let (codes, stride) = match CodeLayout::<BITS>::SPLIT {
            true => {
                let stride = widened(n_words);
                widen_lines(lines, width, n_words, wide);
                (&wide[..], stride)
            }
            false => (lines, width),
        };
        for group in 0..groups {
            let params = &mut params[..count];
            simd::gather(&lines[n_words + group..], width, params);
            let (base, factors) =
                fold::<S, ROWS>(params, &weights[first..], n, folded.as_flattened_mut(), TILE);
            for channel in (group * group_size..(group + 1) * group_size).step_by(lanes) {
                let share = tile_len * width * lanes / head_dim;
                let next = (first + tile_len) * width;
                simd::prefetch(values, next + share * (channel / lanes), share);
                let reader = Codes::<S, BITS>::at(channel);
                let sums = reader.sums::<ROWS>(&Terms {
                    words: &codes[channel / Codes::<S, BITS>::CODES..],
                    stride,
                    word_stride: 1,
                    factors: folded.as_flattened(),
                    row_stride: TILE,
                    n: count,
                });
                for r in 0..ROWS {
                    let out = &mut o[r * head_dim + channel..][..lanes];
                    let added = reader.restore(sums[r], factors[r], base[r]);
                    store(out, load::<S, f32>(out) + added);
                }
            }
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests;
