//! Attention over packed tokens, without restoring them.
//!
//! Parameters stay outside the loops over codes: keys fold theirs into the query once per group,
//! values fold theirs into the weights once per token and group. What is left is one multiplication
//! and addition per code and query row. A word is spread over the lanes of a vector and masked; a
//! code stays at its place in the word, which makes it a power of two too large, the same one in a
//! lane throughout, so it is divided out once at the end. Processors that multiply bytes do the same in
//! integers.

use core::ops::Range;

use macerator::{Scalar, Simd, Vector};

use super::{
    quantize::{unpack_parameters, unpack_vector},
    simd::{self, MAX_LANES, load, store, store_part},
};
use crate::layout::QuantSpec;

/// Most query rows that share the unpacking of a word; more would spill 16 vector registers.
const MAX_ROWS: usize = 4;

/// Rows of `head_dim` elements that [`score`] needs for itself.
pub(super) const SCRATCH_ROWS: usize = 2 * MAX_ROWS;

/// Most tokens whose folded weights are in the first-level cache at once.
const TILE: usize = 128;

/// Most words of values there, with as many that are on their way.
const TILE_WORDS: usize = 1280;

/// Whether every vector of codes lies within one group.
pub(super) fn serves(spec: &QuantSpec) -> bool {
    spec.group_size.is_multiple_of(simd::lanes())
}

/// A function for the bits and for up to [`MAX_ROWS`] rows.
macro_rules! by_shape {
    ($($name:ident)::+, $spec:expr, $rows:expr) => {
        match ($spec.n_bits, $rows) {
            (2, 1) => $($name)::+::<16, 1>,
            (2, 2) => $($name)::+::<16, 2>,
            (2, 3) => $($name)::+::<16, 3>,
            (2, _) => $($name)::+::<16, 4>,
            (4, 1) => $($name)::+::<8, 1>,
            (4, 2) => $($name)::+::<8, 2>,
            (4, 3) => $($name)::+::<8, 3>,
            (4, _) => $($name)::+::<8, 4>,
            (_, 1) => $($name)::+::<4, 1>,
            (_, 2) => $($name)::+::<4, 2>,
            (_, 3) => $($name)::+::<4, 3>,
            (_, _) => $($name)::+::<4, 4>,
        }
    };
}

/// The kernel for a shape: in integers where the processor multiplies bytes.
macro_rules! kernel {
    ($name:ident, $spec:expr, $rows:expr, $head_dim:expr) => {{
        let kernel = by_shape!($name, $spec, $rows);
        #[cfg(target_arch = "x86_64")]
        let kernel = match vnni::serves($spec, $head_dim) {
            true => by_shape!(vnni::$name, $spec, $rows),
            false => kernel,
        };
        kernel
    }};
}

#[cfg(target_arch = "x86_64")]
mod vnni;

/// Splits `rows` into runs of at most [`MAX_ROWS`]: first row and length.
fn runs(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).step_by(MAX_ROWS).map(move |first| (first, MAX_ROWS.min(rows - first)))
}

/// `scores[r * n + t] = query_r . key_t` of the packed keys of `tokens`, which start at a group.
#[allow(clippy::too_many_arguments, reason = "slices of one problem")]
pub(super) fn score(
    keys: &[u32],
    query: &[f32],
    scores: &mut [f32],
    n: usize,
    tokens: Range<usize>,
    head_dim: usize,
    spec: &QuantSpec,
    scratch: &mut [f32],
) {
    let start = spec.words(tokens.start, head_dim);
    for (row, rows) in runs(query.len() / head_dim) {
        let query = &query[row * head_dim..][..rows * head_dim];
        let kernel = kernel!(score_rows, spec, rows, head_dim);
        let group_size = spec.group_size;
        kernel(
            &keys[start..],
            query,
            &mut scores[row * n..],
            n,
            tokens.len(),
            head_dim,
            group_size,
            scratch,
        );
    }
}

/// `o_r += sum_t weights[r * n + t] * value_t` of the packed values of `tokens`.
pub(super) fn add(
    values: &[u32],
    weights: &[f32],
    n: usize,
    o: &mut [f32],
    tokens: Range<usize>,
    head_dim: usize,
    spec: &QuantSpec,
) {
    let words = |token| spec.words(token, head_dim);
    let values = &values[words(tokens.start)..words(tokens.end)];
    for (row, rows) in runs(o.len() / head_dim) {
        let o = &mut o[row * head_dim..][..rows * head_dim];
        let kernel = kernel!(add_rows, spec, rows, head_dim);
        kernel(values, &weights[row * n..], n, o, head_dim, spec.group_size);
    }
}

/// Constants by lane, for words of `CODES` codes.
struct Lanes<const CODES: usize>;

impl<const CODES: usize> Lanes<CODES> {
    const N_BITS: usize = 32 / CODES;

    /// Which bits are the code of lane i of the word of code i: two periods, so that a vector may
    /// start at any code.
    const MASK: [u32; 2 * MAX_LANES] = {
        let mut lanes = [0; 2 * MAX_LANES];
        let mut i = 0;
        while i < lanes.len() {
            lanes[i] = (((1u64 << Self::N_BITS) - 1) as u32) << (Self::N_BITS * (i % CODES));
            i += 1;
        }
        lanes
    };

    /// As `MASK`, for vectors that hold several words: zero in the lanes of the others.
    const MASK_OF_WORD: [[u32; MAX_LANES]; MAX_LANES / 4] = {
        let mut words = [[0; MAX_LANES]; MAX_LANES / 4];
        let mut i = 0;
        while i < MAX_LANES {
            words[i / CODES][i] = Self::MASK[i];
            i += 1;
        }
        words
    };

    /// The sign, of the last code of a word.
    ///
    /// Read as a signed integer, that code is negative in its upper half. With its highest bit
    /// flipped it is the code minus half its range, exactly.
    const FLIP: [u32; 2 * MAX_LANES] = {
        let mut lanes = [0; 2 * MAX_LANES];
        let mut i = CODES - 1;
        while i < lanes.len() {
            lanes[i] = 1 << 31;
            i += CODES;
        }
        lanes
    };

    /// What `FLIP` took from a code.
    const FLIPPED: [f32; 2 * MAX_LANES] = {
        let mut lanes = [0.0; 2 * MAX_LANES];
        let mut i = CODES - 1;
        while i < lanes.len() {
            lanes[i] = (1u64 << (Self::N_BITS - 1)) as f32;
            i += CODES;
        }
        lanes
    };

    /// One over what the place of a code in its word multiplies it by.
    const PLACE: [f32; 2 * MAX_LANES] = {
        let mut lanes = [0.0; 2 * MAX_LANES];
        let mut i = 0;
        while i < lanes.len() {
            lanes[i] = 1.0 / (1u64 << (Self::N_BITS * (i % CODES))) as f32;
            i += 1;
        }
        lanes
    };
}

/// Codes and what they are multiplied with: `n` steps, each of a term or of some side by side. A term
/// is a vector of codes and a factor per row.
struct Terms<'a> {
    words: &'a [u32],
    /// From the words of a step to those of the next.
    stride: usize,
    /// From a word of a term to its next word.
    word_stride: usize,
    factors: &'a [f32],
    /// From the factors of a row to those of the next.
    row_stride: usize,
    n: usize,
}

impl Terms<'_> {
    /// Panics where, with `abreast` terms to a step, a term of `words` words or a factor of `rows` rows
    /// is not in the slices.
    #[inline(always)]
    fn check(&self, words: usize, rows: usize, abreast: usize) {
        let last = self.n.saturating_sub(1);
        let last_word = last * self.stride + (words - 1) * self.word_stride;
        assert!(last_word + abreast <= self.words.len());
        assert!((rows - 1) * self.row_stride + (last + 1) * abreast <= self.factors.len());
    }
}

/// Reads the codes of as many consecutive elements as a vector has lanes.
struct Codes<S: Simd, const CODES: usize> {
    masks: [Vector<S, u32>; MAX_LANES / 4],
    flip: Vector<S, u32>,
    flipped: Vector<S, f32>,
    place: Vector<S, f32>,
}

impl<S: Simd, const CODES: usize> Codes<S, CODES> {
    /// Words that a vector takes codes of.
    #[inline(always)]
    fn words() -> usize {
        (u32::lanes::<S>() / CODES).max(1)
    }

    /// A reader of elements from `first` on, a multiple of the lanes.
    #[inline(always)]
    fn at(first: usize) -> Self {
        let code = first % CODES;
        let mut masks = [load(&Lanes::<CODES>::MASK[code..]); MAX_LANES / 4];
        if Self::words() > 1 {
            for (mask, lanes) in masks.iter_mut().zip(&Lanes::<CODES>::MASK_OF_WORD) {
                *mask = load(lanes);
            }
        }
        Self {
            masks,
            flip: load(&Lanes::<CODES>::FLIP[code..]),
            flipped: load(&Lanes::<CODES>::FLIPPED[code..]),
            place: load(&Lanes::<CODES>::PLACE[code..]),
        }
    }

    /// The codes, each times its place, less half their range where they were flipped.
    #[inline(always)]
    fn read(&self, word: impl Fn(usize) -> u32) -> Vector<S, f32> {
        let mut codes = word(0).splat::<S>() & self.masks[0];
        for i in 1..Self::words() {
            codes |= word(i).splat::<S>() & self.masks[i];
        }
        (codes ^ self.flip).reinterpret::<i32>().to_float()
    }

    /// Per row of factors, the sum of their products with the codes as [`read`](Self::read).
    ///
    /// One vector of codes at a time: a factor that is used once goes from memory into its
    /// multiplication, one for two vectors takes a load of its own, which on Zen 4 costs more than it
    /// saves.
    #[inline(always)]
    fn sums<const ROWS: usize>(&self, terms: &Terms<'_>) -> [Vector<S, f32>; ROWS] {
        terms.check(Self::words(), ROWS, 1);
        let mut even = [0.0f32.splat::<S>(); ROWS];
        let mut odd = even;
        for i in 0..terms.n / 2 {
            self.add(terms, 2 * i, &mut even);
            self.add(terms, 2 * i + 1, &mut odd);
        }
        if terms.n % 2 == 1 {
            self.add(terms, terms.n - 1, &mut even);
        }
        for (even, odd) in even.iter_mut().zip(odd) {
            *even += odd;
        }
        even
    }

    /// Adds the products of term `i`; `terms` are checked.
    #[inline(always)]
    fn add<const ROWS: usize>(
        &self,
        terms: &Terms<'_>,
        i: usize,
        sums: &mut [Vector<S, f32>; ROWS],
    ) {
        // SAFETY: `check` has seen that the words and factors of every term are in the slices.
        let word = |word| unsafe {
            *terms.words.get_unchecked(i * terms.stride + word * terms.word_stride)
        };
        // SAFETY: as above.
        let factor = |row| unsafe { *terms.factors.get_unchecked(row * terms.row_stride + i) };
        let codes = self.read(word);
        for (r, sum) in sums.iter_mut().enumerate() {
            *sum = codes.mul_add(factor(r).splat(), *sum);
        }
    }

    /// Turns `sum`, of [`read`](Self::read) codes times factors that add up to `factors`, into that
    /// of the codes themselves, and adds `base`.
    #[inline(always)]
    fn restore(&self, sum: Vector<S, f32>, factors: f32, base: f32) -> Vector<S, f32> {
        let base = self.flipped.mul_add(factors.splat(), base.splat());
        sum.mul_add(self.place, base)
    }
}

/// Multiplies `ROWS` rows of `factors`, `stride` apart, by the scales of `params`, into rows of `folded`,
/// `folded_stride` apart. Returns by row the sum of `factors` times minima, and that of `folded`.
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

/// [`score`] of `ROWS` rows over `tokens` tokens; tokens are the lanes, so nothing is summed across
/// a vector.
#[macerator::with_simd]
#[allow(clippy::too_many_arguments, reason = "slices of one problem")]
fn score_rows<S: Simd, const CODES: usize, const ROWS: usize>(
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
    let group_words = (group_size / CODES + 1) * head_dim;
    for (group, words) in
        keys.chunks_exact(group_words).take(tokens.div_ceil(group_size)).enumerate()
    {
        let (codes, params) = words.split_at(group_words - head_dim);
        let (base, factors) = fold::<S, ROWS>(params, query, head_dim, scratch, head_dim);
        let in_group = group_size.min(tokens - group * group_size);
        for first in (0..in_group).step_by(lanes) {
            // The next group, a share for each vector of this one.
            let share = group_words * lanes / group_size;
            simd::prefetch(keys, (group + 1) * group_words + share * (first / lanes), share);
            let reader = Codes::<S, CODES>::at(first);
            let sums = reader.sums::<ROWS>(&Terms {
                words: &codes[first / CODES * head_dim..],
                stride: 1,
                word_stride: head_dim,
                factors: scratch,
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

/// [`add`] for `ROWS` rows; channels are the lanes.
#[macerator::with_simd]
fn add_rows<S: Simd, const CODES: usize, const ROWS: usize>(
    values: &[u32],
    weights: &[f32],
    n: usize,
    o: &mut [f32],
    head_dim: usize,
    group_size: usize,
) {
    let lanes = u32::lanes::<S>();
    let (n_words, groups) = (head_dim / CODES, head_dim / group_size);
    let width = n_words + groups;
    let tile_len = (TILE_WORDS / width / lanes * lanes).clamp(lanes, TILE);
    let mut params = [0; TILE];
    let mut folded = [[0.0; TILE]; ROWS];
    for (tile, lines) in values.chunks(tile_len * width).enumerate() {
        let (first, count) = (tile * tile_len, lines.len() / width);
        for group in 0..groups {
            let params = &mut params[..count];
            simd::gather(&lines[n_words + group..], width, params);
            let (base, factors) =
                fold::<S, ROWS>(params, &weights[first..], n, folded.as_flattened_mut(), TILE);
            for channel in (group * group_size..(group + 1) * group_size).step_by(lanes) {
                let share = tile_len * width * lanes / head_dim;
                let next = (first + tile_len) * width;
                simd::prefetch(values, next + share * (channel / lanes), share);
                let reader = Codes::<S, CODES>::at(channel);
                let sums = reader.sums::<ROWS>(&Terms {
                    words: &lines[channel / CODES..],
                    stride: width,
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
#[allow(clippy::print_stderr, reason = "a skipped test says so")]
mod tests;
