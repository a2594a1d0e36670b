//! Attention over packed tokens in integers, for processors that multiply bytes: AVX-512 with VNNI.
//!
//! The same sums as the kernels [in floating point](super), computed in fixed point. The factors of a
//! group (query or weight times scale) are divided by the largest of them and rounded to integers of 23
//! bits, written as three signed digits to base 256. The instruction `vpdpbusd` multiplies, in each of 16
//! lanes, four bytes (here: the codes of four terms) with four signed bytes (one digit of the four
//! factors) and adds the products to a 32-bit sum. So four terms take three instructions, one for each
//! digit, where floating point takes four.
//!
//! The rounding changes a factor by at most 2^-23 of the largest factor, about as much as rounding a
//! sum of f32 does. As in floating point, codes are masked but not shifted down within their byte.

use core::{arch::x86_64::*, mem};

use super::{MAX_ROWS, TILE, TILE_WORDS, Terms};
use crate::{
    backends::flex::{quantize::WIDEN, simd},
    layout::QuantSpec,
};

/// 32-bit lanes of a vector.
const LANES: usize = 16;

/// Terms that one instruction multiplies: one for each byte of a lane.
const QUAD: usize = 4;

/// Digits to base 256 of a factor, a signed byte each.
const DIGITS: usize = 3;

/// The integer that the largest factor of a group is scaled to. Its sum with [`ZERO`] is below 2^23, also
/// when rounded up.
const LARGEST: f32 = 0x3f_7f00 as f32;

/// Makes the bytes of an integer its signed digits: with `x + ZERO` written to base 256, subtracting
/// `ZERO` from it byte by byte, without borrowing, leaves three signed bytes whose value is x.
const ZERO: u32 = 0x40_8080;

/// The largest factor of a group counts as at least this, so that the division by it does not
/// overflow. Factors below it are too small to change a softmax.
const SMALLEST: f32 = 1e-30;

/// Whether this processor has the instructions and the shape fits the kernels.
pub(super) fn serves(spec: &QuantSpec, head_dim: usize) -> bool {
    let line = Line::new(head_dim, spec.codes_per_word(), spec.group_size);
    available() && head_dim.is_multiple_of(LANES) && line.words * LANES <= TILE_WORDS
}

pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

/// The packed values of one token: words of codes, then one parameter word per group.
struct Line {
    codes: usize,
    groups: usize,
    width: usize,
    /// `width` rounded up to a multiple of [`QUAD`].
    words: usize,
}

impl Line {
    const fn new(head_dim: usize, codes_per_word: usize, group_size: usize) -> Self {
        let (codes, groups) = (head_dim / codes_per_word, head_dim / group_size);
        let width = codes + groups;
        Self { codes, groups, width, words: width.next_multiple_of(QUAD) }
    }
}

/// Constants for each lane of a vector, for words of `CODES` codes.
struct Lanes<const CODES: usize>;

impl<const CODES: usize> Lanes<CODES> {
    const N_BITS: usize = 32 / CODES;

    /// For each lane, the byte that holds its code, in each of the four words of a quad.
    const BYTES: [[u8; QUAD]; LANES] = {
        let mut lanes = [[0; QUAD]; LANES];
        let mut i = 0;
        while i < LANES * QUAD {
            let (lane, word) = (i / QUAD, i % QUAD);
            lanes[lane][word] = (QUAD * word + lane % CODES * Self::N_BITS / 8) as u8;
            i += 1;
        }
        lanes
    };

    /// For each lane, which bits of these bytes are the code.
    const MASK: [[u8; QUAD]; LANES] = {
        let mut lanes = [[0; QUAD]; LANES];
        let mut i = 0;
        while i < LANES {
            let code = ((1u32 << Self::N_BITS) - 1) << Self::place(i);
            lanes[i] = [code as u8; QUAD];
            i += 1;
        }
        lanes
    };

    /// `2^-k`, where k is the bit offset of a lane's code within its byte.
    const PLACE: [f32; LANES] = {
        let mut lanes = [0.0; LANES];
        let mut i = 0;
        while i < LANES {
            lanes[i] = 1.0 / (1u32 << Self::place(i)) as f32;
            i += 1;
        }
        lanes
    };

    const fn place(lane: usize) -> usize {
        lane * Self::N_BITS % 8
    }
}

/// Reads the codes of 16 consecutive elements, one per lane.
struct Codes<const CODES: usize> {
    bytes: __m512i,
    mask: __m512i,
    place: __m512,
}

impl<const CODES: usize> Codes<CODES> {
    /// Number of words that the codes of one term come from.
    const WORDS: usize = LANES.div_ceil(CODES);

    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn new() -> Self {
        Self {
            bytes: load(Lanes::<CODES>::BYTES.as_flattened()),
            mask: load(Lanes::<CODES>::MASK.as_flattened()),
            place: _mm512_castsi512_ps(load(&Lanes::<CODES>::PLACE)),
        }
    }

    /// For each query row, the sum over all terms of factor times codes, where a code counts 2^k times
    /// as it was not shifted down. A step is a quad of terms, whose factors are digits as
    /// [`to_digits`] writes them.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn sums<const ROWS: usize>(&self, terms: &Terms<'_>) -> [__m512; ROWS] {
        terms.check(Self::WORDS, ROWS, QUAD);
        let mut sums = [[_mm512_setzero_si512(); DIGITS]; ROWS];
        for quad in 0..terms.n {
            // SAFETY: `check` has seen that the words of each quad are in the slice.
            let words = |i: usize| unsafe {
                let words =
                    terms.words.get_unchecked(quad * terms.stride + i * terms.word_stride..);
                _mm_loadu_si128(words.as_ptr().cast())
            };
            let mut codes = _mm512_broadcast_i32x4(words(0));
            if Self::WORDS == 2 {
                codes = _mm512_mask_broadcast_i32x4(codes, 0xff00, words(1));
            } else if Self::WORDS == 4 {
                codes = _mm512_mask_broadcast_i32x4(codes, 0x00f0, words(1));
                codes = _mm512_mask_broadcast_i32x4(codes, 0x0f00, words(2));
                codes = _mm512_mask_broadcast_i32x4(codes, 0xf000, words(3));
            }
            codes = _mm512_and_si512(_mm512_shuffle_epi8(codes, self.bytes), self.mask);
            for (row, sums) in sums.iter_mut().enumerate() {
                for (digit, sum) in sums.iter_mut().enumerate() {
                    let i = row * terms.row_stride + quad * QUAD + digit;
                    // SAFETY: `check` has seen that the digits of each quad are in the slice.
                    let digits = unsafe { terms.factors.get_unchecked(i) }.to_bits();
                    *sum = _mm512_dpbusd_epi32(*sum, codes, _mm512_set1_epi32(digits as i32));
                }
            }
        }
        let base = _mm512_set1_ps(256.0);
        let mut totals = [_mm512_setzero_ps(); ROWS];
        for (total, [low, middle, high]) in totals.iter_mut().zip(sums) {
            let upper = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), base, _mm512_cvtepi32_ps(middle));
            *total = _mm512_fmadd_ps(upper, base, _mm512_cvtepi32_ps(low));
        }
        totals
    }

    /// Turns one of [`sums`](Self::sums) into the sum of codes times factors, and adds `base`. `unit` is
    /// the factor that the integer 1 stands for.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn restore(&self, sum: __m512, unit: f32, base: f32) -> __m512 {
        let unit = _mm512_mul_ps(self.place, _mm512_set1_ps(unit));
        _mm512_fmadd_ps(sum, unit, _mm512_set1_ps(base))
    }
}

/// The first 64 bytes of `x`.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn load<T: Copy>(x: &[T]) -> __m512i {
    assert!(size_of_val(x) >= size_of::<__m512i>());
    // SAFETY: the slice has at least the bytes of a vector, and T is a plain number.
    unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
}

/// The first four of `words`.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn load_quad(words: &[u32]) -> __m128i {
    assert!(words.len() >= QUAD);
    // SAFETY: the slice has at least four words.
    unsafe { _mm_loadu_si128(words.as_ptr().cast()) }
}

/// Four quads as one vector.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn join(quad: impl Fn(usize) -> __m128i) -> __m512i {
    let joined = _mm512_castsi128_si512(quad(0));
    let joined = _mm512_inserti32x4::<1>(joined, quad(1));
    let joined = _mm512_inserti32x4::<2>(joined, quad(2));
    _mm512_inserti32x4::<3>(joined, quad(3))
}

/// What [`fold`] returns of the factors of a group, for each query row.
#[derive(Clone, Copy)]
struct Folded {
    /// Sum of factor times minimum.
    base: [f32; MAX_ROWS],
    /// Largest magnitude of factor times scale.
    largest: [f32; MAX_ROWS],
}

/// Multiplies `ROWS` rows of `n` factors (`stride` apart) by their scales and writes them to `scaled` (rows
/// `scaled_stride` apart). `params(i)` are the 16 parameter words of factors i to i + 15.
///
/// Factors that are not finite cannot be made integers; they reach the result through
/// [`base`](Folded::base).
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn fold<const ROWS: usize>(
    n: usize,
    params: impl Fn(usize) -> __m512i,
    factors: &[f32],
    stride: usize,
    scaled: &mut [f32],
    scaled_stride: usize,
) -> Folded {
    assert!((ROWS - 1) * stride + n <= factors.len());
    assert!((ROWS - 1) * scaled_stride + n.next_multiple_of(LANES) <= scaled.len());
    let [mut base, mut largest] = [[_mm512_setzero_ps(); MAX_ROWS]; 2];
    for first in (0..n).step_by(LANES) {
        let (scale, min) = unpack_parameters(params(first));
        let wanted = u16::MAX >> LANES.saturating_sub(n - first);
        for row in 0..ROWS {
            // SAFETY: `wanted` masks what lies past the n factors, which are in the slice as asserted.
            let factor = unsafe {
                let factors = factors.as_ptr().add(row * stride + first);
                _mm512_maskz_loadu_ps(wanted, factors)
            };
            let product = _mm512_mul_ps(factor, scale);
            // SAFETY: as asserted, a row of `scaled` has room for whole vectors.
            unsafe {
                _mm512_storeu_ps(scaled.as_mut_ptr().add(row * scaled_stride + first), product)
            };
            base[row] = _mm512_fmadd_ps(factor, min, base[row]);
            largest[row] = _mm512_range_ps::<LARGER_MAGNITUDE>(largest[row], product);
        }
    }
    Folded {
        base: across(base, |a, b| _mm512_add_ps(a, b)),
        largest: across(largest, |a, b| _mm512_max_ps(a, b)),
    }
}

/// Overwrites the factors that [`fold`] has scaled with their digits. Returns for each row the factor that
/// the integer 1 stands for.
///
/// Four factors become four words: the four lowest digits, the four middle ones, the four highest, and
/// one word that is not read.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn to_digits<const ROWS: usize>(
    n: usize,
    largest: [f32; MAX_ROWS],
    scaled: &mut [f32],
    stride: usize,
) -> [f32; MAX_ROWS] {
    assert!((ROWS - 1) * stride + n.next_multiple_of(LANES) <= scaled.len());
    let largest = largest.map(|largest| largest.max(SMALLEST));
    let per_unit = largest.map(|largest| LARGEST / largest);
    // A float of 2^23 or more has no bits for a fraction, so that this addition rounds to an integer.
    let zero = _mm512_set1_ps(((1 << 23) + ZERO) as f32);
    let zero_digits = _mm512_set1_epi32(ZERO as i32);
    let by_digit = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let by_digit = _mm512_broadcast_i32x4(by_digit);
    for first in (0..n).step_by(LANES) {
        for row in 0..ROWS {
            // SAFETY: as asserted, a row of `scaled` has room for whole vectors.
            unsafe {
                let digits = scaled.as_mut_ptr().add(row * stride + first);
                let per_unit = _mm512_set1_ps(per_unit[row]);
                let units = _mm512_fmadd_ps(_mm512_loadu_ps(digits), per_unit, zero);
                let bytes = _mm512_sub_epi8(_mm512_castps_si512(units), zero_digits);
                let bytes = _mm512_shuffle_epi8(bytes, by_digit);
                _mm512_storeu_ps(digits, _mm512_castsi512_ps(bytes));
            }
        }
    }
    largest.map(|largest| largest / LARGEST)
}

/// Selects the operation of `vrangeps`: the larger magnitude of two elements, as a positive number.
const LARGER_MAGNITUDE: i32 = 0b1011;

/// Reduces each of four vectors to one number.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn across(rows: [__m512; 4], with: impl Fn(__m512, __m512) -> __m512) -> [f32; 4] {
    let [a, b, c, d] = rows;
    let ab = with(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let cd = with(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    let lanes = with(_mm512_shuffle_ps::<0x44>(ab, cd), _mm512_shuffle_ps::<0xee>(ab, cd));
    let halves = with(lanes, _mm512_shuffle_f32x4::<0x4e>(lanes, lanes));
    let whole = with(halves, _mm512_shuffle_f32x4::<0xb1>(halves, halves));
    let mut out = [0.0; 4];
    // SAFETY: the array has four floats.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), _mm512_castps512_ps128(whole)) };
    out
}

/// [`unpack_parameters`](crate::backends::flex::quantize::unpack_parameters) of a vector of words.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn unpack_parameters(words: __m512i) -> (__m512, __m512) {
    let magnitude = _mm512_set1_epi32(0x7fff << 13);
    let scale = _mm512_and_si512(_mm512_slli_epi32::<13>(words), magnitude);
    // An arithmetic shift keeps the sign bit in place and copies it to its right; `signed` masks the
    // copies.
    let signed = _mm512_or_si512(magnitude, _mm512_set1_epi32(i32::MIN));
    let min = _mm512_and_si512(_mm512_srai_epi32::<3>(words), signed);
    let widen = _mm512_set1_ps(WIDEN);
    let scale = _mm512_mul_ps(_mm512_castsi512_ps(scale), widen);
    (scale, _mm512_mul_ps(_mm512_castsi512_ps(min), widen))
}

/// [`score_rows`](super::score_rows) in integers.
#[allow(clippy::too_many_arguments, reason = "slices of one problem")]
pub(super) fn score_rows<const CODES: usize, const ROWS: usize>(
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
        score::<CODES, ROWS>(keys, query, scores, n, tokens, head_dim, group_size, scratch);
    }
}

#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[allow(clippy::too_many_arguments, reason = "slices of one problem")]
fn score<const CODES: usize, const ROWS: usize>(
    keys: &[u32],
    query: &[f32],
    scores: &mut [f32],
    n: usize,
    tokens: usize,
    head_dim: usize,
    group_size: usize,
    scratch: &mut [f32],
) {
    let reader = Codes::<CODES>::new();
    let group_words = (group_size / CODES + 1) * head_dim;
    let n_groups = tokens.div_ceil(group_size);
    // Step `step` folds the factors of group `step`, then reads the codes of the group before. Both
    // are independent, so the processor can overlap them: the largest factor of a group, which its
    // digits need, takes long to compute.
    let (mut digits, mut scaled) = scratch.split_at_mut(MAX_ROWS * head_dim);
    let mut next = Folded { base: [0.0; MAX_ROWS], largest: [0.0; MAX_ROWS] };
    let mut unit = [0.0; MAX_ROWS];
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
            // Prefetches the third group from this one, a share of it with each vector: the next is
            // folded already, and the one after it is about to be.
            let share = group_words * LANES / group_size;
            simd::prefetch(keys, (group + 3) * group_words + share * (first / LANES), share);
            let sums = reader.sums::<ROWS>(&Terms {
                words: &words[first / CODES * head_dim..],
                stride: QUAD,
                word_stride: head_dim,
                factors: digits,
                row_stride: head_dim,
                n: head_dim / QUAD,
            });
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

/// [`add_rows`](super::add_rows) in integers.
pub(super) fn add_rows<const CODES: usize, const ROWS: usize>(
    values: &[u32],
    weights: &[f32],
    n: usize,
    o: &mut [f32],
    head_dim: usize,
    group_size: usize,
) {
    assert!(available());
    // SAFETY: the processor has the instructions that the function is compiled for, as asserted.
    unsafe { add::<CODES, ROWS>(values, weights, n, o, head_dim, group_size) }
}

#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn add<const CODES: usize, const ROWS: usize>(
    values: &[u32],
    weights: &[f32],
    n: usize,
    o: &mut [f32],
    head_dim: usize,
    group_size: usize,
) {
    let reader = Codes::<CODES>::new();
    let line = Line::new(head_dim, CODES, group_size);
    let tile_len = (TILE_WORDS / line.words / LANES * LANES).clamp(LANES, TILE);
    let mut quads = Aligned([0; TILE_WORDS]);
    let mut digits = Aligned([[0.0; TILE]; ROWS]);
    let digits = digits.0.as_flattened_mut();
    for (tile, lines) in values.chunks(tile_len * line.width).enumerate() {
        let (first, count) = (tile * tile_len, lines.len() / line.width);
        let quads = &mut quads.0[..count.next_multiple_of(LANES) * line.words];
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
                let sums = reader.sums::<ROWS>(&Terms {
                    words: &quads[channel / CODES * QUAD..],
                    stride: line.words * QUAD,
                    word_stride: QUAD,
                    factors: digits,
                    row_stride: TILE,
                    n: count.div_ceil(QUAD),
                });
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

/// Aligned to a cache line, so that a vector read at a multiple of 64 bytes crosses none.
#[repr(align(64))]
struct Aligned<T>(T);

/// Transposes lines of `width` words four at a time: of each quad of lines, the four first words
/// come first, then the four second words, and so on, padded to a multiple of four words. Lines
/// past the last are zeros.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn transpose(lines: &[u32], width: usize, quads: &mut [u32]) {
    let words = width.next_multiple_of(QUAD);
    let by_word = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (quad, out) in quads.chunks_exact_mut(words * QUAD).enumerate() {
        let first = quad * QUAD * width;
        // The loop below reads a whole number of quads from each line, so past its end into the next
        // line. Where that would leave the slice, words are copied one by one.
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
