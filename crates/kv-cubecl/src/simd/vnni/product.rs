//! Products of floats with codes: `left` in f32, as [digits](super), times signed bytes.

use core::arch::x86_64::*;

use super::{
    DIGITS, LANES, LARGER_MAGNITUDE, QUAD, ROWS, across, first_lanes, join_digits, to_digits,
};
use crate::simd::{
    prefetch,
    transpose::{transpose, transpose_lanes},
};

/// Vectors of columns that are multiplied together. The sums of all digits then take 24 of the 32
/// registers.
const VECTORS: usize = 2;

/// A vector of four codes for each of 16 columns.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Codes([u32; LANES]);

const EMPTY: Codes = Codes([0; LANES]);

/// The sign bits of four bytes. Flipped, they make a signed byte one that is not, greater by 128.
const SIGNS: i32 = 0x8080_8080_u32 as i32;

/// A matrix of f32 as digits, `[rows, depth]`.
#[derive(Default)]
pub(crate) struct Digits {
    /// The rows as [`to_digits`] writes them, padded with zeros to whole vectors and to a multiple
    /// of [`ROWS`].
    words: Vec<f32>,
    /// Words of a row.
    width: usize,
    rows: Vec<Row>,
}

/// The corrections that turn a row's sums of digits into a product.
#[derive(Clone, Copy)]
struct Row {
    /// The sum of each digit, times 128: codes that are greater by 128 add it. The last element is
    /// not used.
    excess: [i32; DIGITS + 1],
    /// The factor that the integer 1 stands for; NaN if not all factors are finite.
    unit: f32,
}

/// The most terms of a product: with 2^17, sums of 128 * 128 each would leave 32 bits.
const MOST_TERMS: usize = 1 << 16;

impl Digits {
    /// Multiplies each row of `x` by `scales`, and stores its digits. Rows start `stride` numbers
    /// apart.
    ///
    /// # Panics
    /// Panics if `x` is shorter than its rows, or there are more than 2^16 scales.
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(crate) fn fill(&mut self, x: &[f32], stride: usize, rows: usize, scales: &[f32]) {
        let depth = scales.len();
        assert!(depth <= MOST_TERMS);
        let width = depth.next_multiple_of(LANES);
        self.width = width;
        self.words.resize(rows.next_multiple_of(ROWS) * width, 0.0);
        self.rows.clear();
        for (nth, words) in self.words.chunks_exact_mut(ROWS * width).enumerate() {
            let first_row = nth * ROWS;
            // Rows past the last are zeros: their masks have no lanes.
            let source = |row: usize| match first_row + row < rows {
                true => (x[(first_row + row) * stride..][..depth].as_ptr(), u16::MAX),
                false => (x.as_ptr(), 0),
            };
            let sources: [_; ROWS] = core::array::from_fn(source);
            let [mut largest, mut sums] = [[_mm512_setzero_ps(); ROWS]; 2];
            for first in (0..depth).step_by(LANES) {
                let wanted = first_lanes(depth - first);
                for (row, &(source, mask)) in sources.iter().enumerate() {
                    // SAFETY: the masks leave out what is past the row and its scales, and `words`
                    // have room for whole vectors of each row.
                    unsafe {
                        let scales = _mm512_maskz_loadu_ps(wanted, scales.as_ptr().add(first));
                        let source = source.wrapping_add(first);
                        let factors = _mm512_maskz_loadu_ps(wanted & mask, source);
                        let product = _mm512_mul_ps(factors, scales);
                        _mm512_storeu_ps(words.as_mut_ptr().add(row * width + first), product);
                        largest[row] = _mm512_range_ps::<LARGER_MAGNITUDE>(largest[row], product);
                        sums[row] = _mm512_add_ps(sums[row], product);
                    }
                }
            }
            let largest = across(largest, |a, b| _mm512_max_ps(a, b));
            let sums = across(sums, |a, b| _mm512_add_ps(a, b));
            let units = to_digits::<ROWS>(depth, largest, words, width);
            for row in 0..ROWS {
                let excess = excess(&words[row * width..][..width]);
                let unit = if sums[row].is_finite() { units[row] } else { f32::NAN };
                self.rows.push(Row { excess, unit });
            }
        }
    }
}

/// Returns the sum of each digit of a row, times 128.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn excess(row: &[f32]) -> [i32; DIGITS + 1] {
    let mut sums = _mm512_setzero_si512();
    for digits in row.as_chunks::<LANES>().0 {
        // SAFETY: the array is a vector.
        let digits = unsafe { _mm512_loadu_si512(digits.as_ptr().cast()) };
        sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi32(SIGNS), digits);
    }
    let halves =
        _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64::<1>(sums));
    let quarter =
        _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
    let mut excess = [0; DIGITS + 1];
    // SAFETY: the array has four integers.
    unsafe { _mm_storeu_si128(excess.as_mut_ptr().cast(), quarter) };
    excess
}

/// Signed bytes as right factors of [`Digits`].
#[derive(Default)]
pub(crate) struct Panel {
    /// For each quad of terms, the vectors of its columns.
    codes: Vec<Codes>,
    /// Vectors of a quad, a multiple of [`VECTORS`].
    vectors: usize,
    columns: usize,
}

impl Panel {
    fn resize(&mut self, columns: usize, quads: usize) {
        self.columns = columns;
        self.vectors = columns.div_ceil(LANES).next_multiple_of(VECTORS);
        self.codes.resize(quads * self.vectors, EMPTY);
    }

    /// Takes tokens as columns. The codes of each token are `width` of the `words`.
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(crate) fn fill_columns(&mut self, words: &[u32], width: usize, tokens: usize) {
        assert!(tokens * width <= words.len());
        self.resize(tokens, width);
        for vector in 0..tokens.div_ceil(LANES) {
            for first in (0..width).step_by(LANES) {
                let in_token = first_lanes(width - first);
                let mut lines = [_mm512_setzero_si512(); LANES];
                let of_vector = vector * LANES..tokens.min((vector + 1) * LANES);
                for (token, line) in of_vector.zip(&mut lines) {
                    let from = words[token * width + first..].as_ptr();
                    // SAFETY: the mask leaves out what is past the token.
                    let codes = unsafe { _mm512_maskz_loadu_epi32(in_token, from.cast()) };
                    *line = _mm512_xor_si512(codes, _mm512_set1_epi32(SIGNS));
                }
                let columns = transpose(lines);
                for quad in first..width.min(first + LANES) {
                    self.store(quad, vector, columns[quad - first]);
                }
            }
        }
    }

    /// Takes tokens as rows. The codes of each token are `width` of the `words`.
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(crate) fn fill_rows(&mut self, words: &[u32], width: usize, tokens: usize) {
        assert!(tokens * width <= words.len());
        self.resize(width * QUAD, tokens.div_ceil(QUAD));
        for quad in 0..tokens.div_ceil(QUAD) {
            for first in (0..width).step_by(LANES) {
                let mut lines = [_mm512_setzero_si512(); QUAD];
                for (token, line) in (quad * QUAD..tokens).zip(&mut lines) {
                    let from = words[token * width + first..].as_ptr();
                    // SAFETY: the mask leaves out what is past the token.
                    let codes = unsafe {
                        _mm512_maskz_loadu_epi32(first_lanes(width - first), from.cast())
                    };
                    *line = _mm512_xor_si512(codes, _mm512_set1_epi32(SIGNS));
                }
                let [a, b, c, d] = lines;
                let [ab, cd] = [_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d)];
                let [ab_high, cd_high] = [_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d)];
                // Of each 16 channels, the first four are in the first vector, and so on.
                let fours = [
                    _mm512_unpacklo_epi16(ab, cd),
                    _mm512_unpackhi_epi16(ab, cd),
                    _mm512_unpacklo_epi16(ab_high, cd_high),
                    _mm512_unpackhi_epi16(ab_high, cd_high),
                ];
                let vectors = transpose_lanes(fours);
                let vector = first * QUAD / LANES;
                for (nth, codes) in vectors.into_iter().take(self.vectors - vector).enumerate() {
                    self.store(quad, vector + nth, codes);
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn store(&mut self, quad: usize, vector: usize, codes: __m512i) {
        let to = &mut self.codes[quad * self.vectors + vector];
        // SAFETY: the place is aligned and has 64 bytes.
        unsafe { _mm512_store_si512(to.0.as_mut_ptr().cast(), codes) };
    }

    /// Computes `out[r * stride + c] = scales[c] * sum_k left[r][k] * codes[k][c]`, or, without
    /// scales, adds the sum to `out`. Prefetches `next`, a share with each [`ROWS`]
    /// rows.
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(crate) fn multiply(
        &self,
        left: &Digits,
        scales: Option<&[f32]>,
        out: &mut [f32],
        stride: usize,
        next: &[u32],
    ) {
        let share = next.len().div_ceil(left.rows.len() / ROWS);
        for (nth, out) in out.chunks_mut(ROWS * stride).enumerate() {
            prefetch(next, nth * share, share);
            for vector in (0..self.vectors).step_by(VECTORS) {
                let sums = self.sums(left, nth * ROWS, vector);
                for (row, out) in out.chunks_mut(stride).enumerate() {
                    for (nth, &sums) in sums[row].iter().enumerate() {
                        let first = (vector + nth) * LANES;
                        if first >= self.columns {
                            continue;
                        }
                        let wanted = first_lanes(self.columns - first);
                        let out = &mut out[first..self.columns];
                        // SAFETY: the mask leaves out what is past the columns.
                        unsafe {
                            let of_columns = match scales {
                                Some(scales) => {
                                    let scales = scales[first..self.columns].as_ptr();
                                    _mm512_mul_ps(sums, _mm512_maskz_loadu_ps(wanted, scales))
                                }
                                None => {
                                    let out = _mm512_maskz_loadu_ps(wanted, out.as_ptr());
                                    _mm512_add_ps(sums, out)
                                }
                            };
                            _mm512_mask_storeu_ps(out.as_mut_ptr(), wanted, of_columns);
                        }
                    }
                }
            }
        }
    }

    /// Returns the products of rows from `first` on with the columns of vectors from `vector` on.
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn sums(&self, left: &Digits, first: usize, vector: usize) -> [[__m512; VECTORS]; ROWS] {
        let (width, rows) = (left.width, &left.rows[first..][..ROWS]);
        let digits = &left.words[first * width..][..ROWS * width];
        let quads = self.codes.len() / self.vectors;
        assert!(quads * QUAD <= width && vector + VECTORS <= self.vectors);
        let mut sums = [[[_mm512_setzero_si512(); DIGITS]; VECTORS]; ROWS];
        for (sums, row) in sums.iter_mut().zip(rows) {
            for sums in sums {
                for (sum, excess) in sums.iter_mut().zip(row.excess) {
                    *sum = _mm512_set1_epi32(-excess);
                }
            }
        }
        for quad in 0..quads {
            let mut codes = [_mm512_setzero_si512(); VECTORS];
            for (nth, codes) in codes.iter_mut().enumerate() {
                // SAFETY: the vectors of the quad are in the panel, as asserted.
                let from = unsafe { self.codes.get_unchecked(quad * self.vectors + vector + nth) };
                // SAFETY: the vector is aligned and has 64 bytes.
                *codes = unsafe { _mm512_load_si512(from.0.as_ptr().cast()) };
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                for digit in 0..DIGITS {
                    let at = row * width + quad * QUAD + digit;
                    // SAFETY: the digits of the quad are in the row, as asserted.
                    let digits = unsafe { digits.get_unchecked(at) }.to_bits();
                    let digits = _mm512_set1_epi32(digits as i32);
                    for (sums, &codes) in sums.iter_mut().zip(&codes) {
                        sums[digit] = _mm512_dpbusd_epi32(sums[digit], codes, digits);
                    }
                }
            }
        }
        let mut products = [[_mm512_setzero_ps(); VECTORS]; ROWS];
        for ((products, sums), row) in products.iter_mut().zip(sums).zip(rows) {
            let unit = _mm512_set1_ps(row.unit);
            for (product, digits) in products.iter_mut().zip(sums) {
                *product = _mm512_mul_ps(join_digits(digits), unit);
            }
        }
        products
    }
}

#[cfg(test)]
mod tests;
