//! Attention over packed tokens, without restoring them.
//!
//! Parameters stay outside the loops over codes: keys fold theirs into the query once per group,
//! values fold theirs into the weights once per token and group. What is left is one multiplication
//! and addition per code and query row. A word is spread over the lanes of a vector and masked; a
//! code stays at its place in the word, which makes it a power of two too large, the same one in a
//! lane throughout, so it is divided out once at the end.

use core::ops::Range;

use macerator::{Scalar, Simd, Vector};

use super::{
    quantize::unpack_parameters,
    simd::{self, MAX_LANES, dot, load, store, sum},
};
use crate::layout::QuantSpec;

/// Most query rows that share the unpacking of a word; more would spill 16 vector registers.
const MAX_ROWS: usize = 4;

/// Rows of `head_dim` elements that [`score`] needs for itself.
pub(super) const SCRATCH_ROWS: usize = MAX_ROWS + 2;

/// Tokens whose folded weights are in the first-level cache at once.
const TILE: usize = 64;

/// Whether every vector of codes lies within one group.
pub(super) fn serves(spec: &QuantSpec) -> bool {
    spec.group_size.is_multiple_of(simd::lanes())
}

/// A kernel for the bits and for up to [`MAX_ROWS`] rows.
macro_rules! kernel {
    ($name:ident, $spec:expr, $rows:expr) => {
        match ($spec.n_bits, $rows) {
            (2, 1) => $name::<16, 1>,
            (2, 2) => $name::<16, 2>,
            (2, 3) => $name::<16, 3>,
            (2, _) => $name::<16, 4>,
            (4, 1) => $name::<8, 1>,
            (4, 2) => $name::<8, 2>,
            (4, 3) => $name::<8, 3>,
            (4, _) => $name::<8, 4>,
            (_, 1) => $name::<4, 1>,
            (_, 2) => $name::<4, 2>,
            (_, 3) => $name::<4, 3>,
            (_, _) => $name::<4, 4>,
        }
    };
}

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
        let kernel = kernel!(score_rows, spec, rows);
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
        kernel!(add_rows, spec, rows)(values, &weights[row * n..], n, o, head_dim, spec.group_size);
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

/// Reads the codes of as many consecutive elements as a vector has lanes.
struct Codes<S: Simd, const CODES: usize> {
    masks: [Vector<S, u32>; MAX_LANES / 4],
    flip: Vector<S, u32>,
    flipped: Vector<S, f32>,
    place: Vector<S, f32>,
}

impl<S: Simd, const CODES: usize> Clone for Codes<S, CODES> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Simd, const CODES: usize> Copy for Codes<S, CODES> {}

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

    /// Turns `sum`, of [`read`](Self::read) codes times factors that add up to `factors`, into that
    /// of the codes themselves, and adds `base`.
    #[inline(always)]
    fn restore(&self, sum: Vector<S, f32>, factors: f32, base: f32) -> Vector<S, f32> {
        let base = self.flipped.mul_add(factors.splat(), base.splat());
        sum.mul_add(self.place, base)
    }
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
    let pairs = head_dim / 2;
    let (scale, scratch) = scratch.split_at_mut(head_dim);
    let (min, scratch) = scratch.split_at_mut(head_dim);
    let folded = &mut scratch[..ROWS * head_dim];
    for (group, words) in
        keys.chunks_exact(group_words).take(tokens.div_ceil(group_size)).enumerate()
    {
        let (codes, params) = words.split_at(group_words - head_dim);
        simd::prefetch(keys, (group + 1) * group_words, group_words);
        for ((&word, scale), min) in params.iter().zip(&mut *scale).zip(&mut *min) {
            (*scale, *min) = unpack_parameters(word);
        }
        let (mut base, mut factors) = ([0.0; ROWS], [0.0; ROWS]);
        for r in 0..ROWS {
            let query = &query[r * head_dim..][..head_dim];
            let folded = &mut folded[r * head_dim..][..head_dim];
            for ((folded, q), scale) in folded.iter_mut().zip(query).zip(&*scale) {
                *folded = q * scale;
            }
            base[r] = dot::<S>(query, min);
            factors[r] = sum::<S>(folded);
        }
        let folded: [_; ROWS] = core::array::from_fn(|r| {
            &folded[r * head_dim..][..head_dim].as_chunks::<2>().0[..pairs]
        });
        let in_group = group_size.min(tokens - group * group_size);
        for first in (0..in_group).step_by(lanes) {
            let reader = Codes::<S, CODES>::at(first);
            let lines: [_; MAX_LANES / 4] = core::array::from_fn(|i| {
                let line = first / CODES + i % Codes::<S, CODES>::words();
                &codes[line * head_dim..][..head_dim].as_chunks::<2>().0[..pairs]
            });
            let mut sums = [[0.0f32.splat::<S>(); ROWS]; 2];
            for i in 0..pairs {
                for (half, sums) in sums.iter_mut().enumerate() {
                    let codes = reader.read(|word| lines[word][i][half]);
                    for (sum, folded) in sums.iter_mut().zip(&folded) {
                        *sum = codes.mul_add(folded[i][half].splat(), *sum);
                    }
                }
            }
            for r in 0..ROWS {
                let scored = reader.restore(sums[0][r] + sums[1][r], factors[r], base[r]);
                let wanted = lanes.min(in_group - first);
                let out = &mut scores[r * n + group * group_size + first..][..wanted];
                if wanted == lanes {
                    store(out, scored);
                } else {
                    let mut all = [0.0; MAX_LANES];
                    store(&mut all, scored);
                    out.copy_from_slice(&all[..wanted]);
                }
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
    let (mut params, mut scale, mut min) = ([0; TILE], [0.0; TILE], [0.0; TILE]);
    let mut folded = [[0.0; TILE]; ROWS];
    for (tile, lines) in values.chunks(TILE * width).enumerate() {
        let count = lines.len() / width;
        simd::prefetch(values, (tile + 1) * TILE * width, TILE * width);
        for group in 0..groups {
            // Gathered first, so that what follows is vectors.
            for (param, line) in params.iter_mut().zip(lines.chunks_exact(width)) {
                *param = simd::load_alone(&line[n_words + group]);
            }
            for ((&word, scale), min) in params.iter().zip(&mut scale).zip(&mut min) {
                (*scale, *min) = unpack_parameters(word);
            }
            let (mut base, mut factors) = ([0.0; ROWS], [0.0; ROWS]);
            for r in 0..ROWS {
                let weights = &weights[r * n + tile * TILE..][..count];
                let folded = &mut folded[r][..count];
                for ((folded, weight), scale) in folded.iter_mut().zip(weights).zip(&scale) {
                    *folded = weight * scale;
                }
                base[r] = dot::<S>(weights, &min[..count]);
                factors[r] = sum::<S>(folded);
            }
            let channels = group * group_size..(group + 1) * group_size;
            // Two vectors at a time where the group has them: more sums in flight.
            let mut channel = channels.start;
            while channel + 2 * lanes <= channels.end {
                add_channels::<S, CODES, ROWS, 2>(
                    lines, width, &folded, factors, base, o, channel, head_dim,
                );
                channel += 2 * lanes;
            }
            if channel < channels.end {
                add_channels::<S, CODES, ROWS, 1>(
                    lines, width, &folded, factors, base, o, channel, head_dim,
                );
            }
        }
    }
}

/// Adds `VECTORS` vectors of channels, from `channel` on, of the tokens in `lines`.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "a part of one loop nest")]
fn add_channels<S: Simd, const CODES: usize, const ROWS: usize, const VECTORS: usize>(
    lines: &[u32],
    width: usize,
    folded: &[[f32; TILE]; ROWS],
    factors: [f32; ROWS],
    base: [f32; ROWS],
    o: &mut [f32],
    channel: usize,
    head_dim: usize,
) {
    let lanes = u32::lanes::<S>();
    let mut readers = [Codes::<S, CODES>::at(channel); VECTORS];
    let mut first = [channel / CODES; VECTORS];
    for i in 1..VECTORS {
        readers[i] = Codes::at(channel + i * lanes);
        first[i] = (channel + i * lanes) / CODES;
    }
    let mut sums = [[0.0f32.splat::<S>(); ROWS]; VECTORS];
    for (t, line) in (0..TILE).zip(lines.chunks_exact(width)) {
        for i in 0..VECTORS {
            let words = &line[first[i]..][..Codes::<S, CODES>::words()];
            let codes = readers[i].read(|word| words[word]);
            for (sum, folded) in sums[i].iter_mut().zip(folded) {
                *sum = codes.mul_add(folded[t].splat(), *sum);
            }
        }
    }
    for i in 0..VECTORS {
        for r in 0..ROWS {
            let out = &mut o[r * head_dim + channel + i * lanes..][..lanes];
            let added = readers[i].restore(sums[i][r], factors[r], base[r]);
            store(out, load::<S, f32>(out) + added);
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
#[allow(clippy::print_stderr, reason = "a skipped test says so")]
mod tests;
