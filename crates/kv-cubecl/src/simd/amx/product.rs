//! Products of floats with codes: `left` in f32, as two bf16 digits, times `right` in bf16.

use core::arch::x86_64::*;

use super::{COLUMN_TILES, COLUMNS, DEPTH, EMPTY, ROWS, Row, Sums, Tiles, available};
use crate::simd::transpose::transpose;

/// Digits of a float. Two have 16 of the 24 bits of an f32, and a sign each: they are off by at
/// most 2^-17 of it.
const DIGITS: usize = 2;

/// A matrix of f32 as the digits that sum to it, `[rows, depth]` each, padded with zeros to whole
/// tiles.
#[derive(Default)]
pub(crate) struct Digits {
    /// By tile of rows, digit and row: the tiles of a row.
    tiles: Vec<Row>,
    /// Tiles of a row.
    width: usize,
}

impl Digits {
    /// Splits the rows of `x`, which start `stride` numbers apart, into digits of `scales.len()`
    /// numbers, each multiplied by its scale.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub(crate) fn fill(&mut self, x: &[f32], stride: usize, rows: usize, scales: &[f32]) {
        self.width = scales.len().div_ceil(DEPTH);
        self.tiles.resize(rows.next_multiple_of(ROWS) * DIGITS * self.width, EMPTY);
        let of_digit = ROWS * self.width;
        for (i, tiles) in self.tiles.chunks_exact_mut(DIGITS * of_digit).enumerate() {
            for row in 0..ROWS {
                let nth = i * ROWS + row;
                let x = if nth < rows { &x[nth * stride..][..scales.len()] } else { &[] };
                let (first, second) = tiles.split_at_mut(of_digit);
                let [first, second] = [first, second].map(|to| &mut to[row * self.width..]);
                let (whole, rest) = x.as_chunks::<DEPTH>();
                let (scales, of_rest) = scales.as_chunks::<DEPTH>();
                for k in 0..whole.len() {
                    split(&whole[k], &scales[k], [&mut first[k], &mut second[k]]);
                }
                let (mut last, mut of_last) = ([0.0; DEPTH], [0.0; DEPTH]);
                last[..rest.len()].copy_from_slice(rest);
                of_last[..of_rest.len()].copy_from_slice(of_rest);
                for k in whole.len()..self.width {
                    split(&last, &of_last, [&mut first[k], &mut second[k]]);
                }
            }
        }
    }
}

/// Writes the digits of numbers, each multiplied by its scale, to the same place of both `to`.
///
/// The loops have no closures, which the compiler would call without the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn split(x: &[f32; DEPTH], scales: &[f32; DEPTH], to: [&mut Row; DIGITS]) {
    let [first, second] = to;
    for at in [0, DEPTH / 2] {
        // SAFETY: the arrays have two vectors.
        let (x, scales) = unsafe {
            (_mm512_loadu_ps(x.as_ptr().add(at)), _mm512_loadu_ps(scales.as_ptr().add(at)))
        };
        let x = _mm512_mul_ps(x, scales);
        let high = _mm512_cvtneps_pbh(x);
        let low = _mm512_cvtneps_pbh(_mm512_sub_ps(x, _mm512_cvtpbh_ps(high)));
        // SAFETY: half a row has 32 bytes.
        unsafe {
            first.0[at..].as_mut_ptr().cast::<__m256bh>().write_unaligned(high);
            second.0[at..].as_mut_ptr().cast::<__m256bh>().write_unaligned(low);
        }
    }
}

/// Products of [`Digits`] with codes in bf16, and the memory they take.
pub(crate) struct Products {
    tiles: Tiles,
    /// The codes as right factors.
    right: Vec<Row>,
    /// The sums of a tile of rows.
    sums: [Sums; ROWS * COLUMN_TILES],
}

impl Products {
    /// # Safety
    /// [`available`] must have returned true, and the thread must not have other [`Tiles`].
    pub(crate) unsafe fn new() -> Self {
        debug_assert!(available());
        // SAFETY: as the caller guarantees.
        let tiles = unsafe { Tiles::new() };
        Self { tiles, right: vec![], sums: [Sums([0.0; ROWS]); ROWS * COLUMN_TILES] }
    }

    /// Computes `out[r * stride + t] = scales[t] * sum_c left[r][c] * codes[t][c]` for as many rows
    /// as `out` has. A token's codes are as wide as `left`, and there are at most [`COLUMNS`]
    /// tokens.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub(crate) fn with_rows(
        &mut self,
        left: &Digits,
        codes: &[u16],
        scales: &[f32],
        out: &mut [f32],
        stride: usize,
    ) {
        let width = left.width;
        self.right.resize(width * COLUMNS, EMPTY);
        for (tile, codes) in codes.chunks(ROWS * width * DEPTH).enumerate() {
            for k in 0..width {
                let to = &mut self.right[k * COLUMNS + tile * ROWS..][..ROWS];
                transpose_pairs(&codes[k * DEPTH..], width * DEPTH, to);
            }
        }
        for (nth, out) in out.chunks_mut(ROWS * stride).enumerate() {
            self.multiply(left, nth, 0);
            for (out, sums) in out.chunks_mut(stride).zip(self.stored().chunks_exact(COLUMNS)) {
                for ((out, sum), scale) in out.iter_mut().zip(sums).zip(scales) {
                    *out = sum * scale;
                }
            }
        }
    }

    /// Computes `out[r][c] += sum_t left[r][t] * codes[t][c]`. A row of `out` has `columns`
    /// numbers, and a row of `codes` is padded to whole [`COLUMNS`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub(crate) fn with_columns(
        &mut self,
        left: &Digits,
        codes: &[u16],
        out: &mut [f32],
        columns: usize,
    ) {
        let width = columns.next_multiple_of(COLUMNS);
        self.right.resize(width * left.width, EMPTY);
        for pair in 0..left.width * ROWS {
            let (k, row) = (pair / ROWS, pair % ROWS);
            // The last pair may lack its second token, and the last tile may lack pairs.
            let first = codes.get(2 * pair * width..).unwrap_or_default();
            let second = first.get(width..).unwrap_or_default();
            for tiles in 0..width / DEPTH {
                let (a, b) = (load(first, tiles * DEPTH), load(second, tiles * DEPTH));
                for (half, of_half) in PAIRS.iter().enumerate() {
                    let tile = 2 * tiles + half;
                    let (part, tile) = (tile / COLUMN_TILES, tile % COLUMN_TILES);
                    let to = (part * left.width + k) * COLUMNS + tile * ROWS + row;
                    let pairs = _mm512_permutex2var_epi16(a, load(of_half, 0), b);
                    // SAFETY: a row has 64 bytes.
                    unsafe { _mm512_store_si512(self.right[to].0.as_mut_ptr().cast(), pairs) };
                }
            }
        }
        for (nth, out) in out.chunks_mut(ROWS * columns).enumerate() {
            for part in 0..width / COLUMNS {
                self.multiply(left, nth, part);
                for (out, sums) in out.chunks_mut(columns).zip(self.stored().chunks_exact(COLUMNS))
                {
                    let out = &mut out[part * COLUMNS..];
                    for (out, sum) in out.iter_mut().zip(sums) {
                        *out += sum;
                    }
                }
            }
        }
    }

    /// Returns the sums, `[ROWS, COLUMNS]`.
    fn stored(&mut self) -> &[f32] {
        let sums = bytemuck::cast_slice_mut(&mut self.sums);
        self.tiles.store(sums, COLUMNS);
        sums
    }

    /// Computes the sums of the `nth` tile of rows with a part of the right factors.
    #[inline(always)]
    fn multiply(&self, left: &Digits, nth: usize, part: usize) {
        let width = left.width;
        let right = &self.right[part * width * COLUMNS..][..width * COLUMNS];
        let of_digits = &left.tiles[nth * DIGITS * ROWS * width..][..DIGITS * ROWS * width];
        self.tiles.clear();
        for left in of_digits.chunks_exact(ROWS * width) {
            for (k, right) in right.chunks_exact(COLUMNS).enumerate() {
                self.tiles.multiply(&left[k..], width, right);
            }
        }
    }
}

/// The places of pairs of numbers of two vectors, for the first half of both and for the second.
/// Bit 5 selects the second vector.
const PAIRS: [[u16; DEPTH]; 2] = {
    let mut pairs = [[0; DEPTH]; 2];
    let mut i = 0;
    while i < 2 * DEPTH {
        pairs[i / DEPTH][i % DEPTH] = (i / 2 + i % 2 * DEPTH) as u16;
        i += 1;
    }
    pairs
};

/// Returns a vector of `x` from `first` on; zeros if it is empty.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load(x: &[u16], first: usize) -> __m512i {
    match x.is_empty() {
        true => _mm512_setzero_si512(),
        // SAFETY: the slice has 64 bytes.
        false => unsafe { _mm512_loadu_si512(x[first..][..DEPTH].as_ptr().cast()) },
    }
}

/// Transposes up to 16 rows of 16 pairs, which start `stride` numbers apart; the other rows count
/// as zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn transpose_pairs(rows: &[u16], stride: usize, to: &mut [Row]) {
    let mut x = [_mm512_setzero_si512(); ROWS];
    for (i, row) in rows.chunks(stride).enumerate() {
        x[i] = load(row, 0);
    }
    for (to, column) in to.iter_mut().zip(transpose(x)) {
        // SAFETY: a row has 64 bytes.
        unsafe { _mm512_store_si512(to.0.as_mut_ptr().cast(), column) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// Numbers from -1 to 1 of very different sizes.
    fn noise(seed: &mut u64) -> f32 {
        *seed =
            seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = (*seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        x * 2f32.powi(-((*seed >> 30 & 15) as i32))
    }

    /// An f64 sum of exact products. Digits are off by at most 2^-17; f32 sums of these few hundred
    /// products are off by less than 2^-18 in practice.
    fn near(what: &str, got: f32, products: impl Iterator<Item = (f32, f32)>) {
        let products = products.map(|(a, b)| f64::from(a) * f64::from(b));
        let (sum, size) = products.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
        let off = (f64::from(got) - sum).abs();
        assert!(off <= size * (2f64.powi(-17) + 2f64.powi(-18)), "{what}: {got} for {sum}");
    }

    /// Products with codes match f64 for all sizes, and do not depend on what the memory held
    /// before, here NaN.
    #[test]
    fn products_match_f64() {
        if !available() {
            let _ = writeln!(std::io::stderr(), "SKIPPED products: this CPU has no AMX");
            return;
        }
        let seed = &mut 7;
        for rows in [1, 15, 16, 17, 64] {
            for (tokens, head_dim) in [(1, 8), (5, 32), (16, 40), (63, 64), (64, 100), (64, 256)] {
                let what = format!("{rows} rows, {tokens} tokens, {head_dim} channels");
                check(&what, [rows, tokens, head_dim], seed);
            }
        }
    }

    fn check(what: &str, [rows, tokens, head_dim]: [usize; 3], seed: &mut u64) {
        let mut take = |n: usize| -> Vec<f32> { (0..n).map(|_| noise(seed)).collect() };
        let (query, scales) = (take(rows * head_dim), take(head_dim.max(tokens)));
        let codes: Vec<f32> = take(tokens * head_dim).iter().map(|x| (x * 127.0).round()).collect();
        let padded = |width: usize| -> Vec<u16> {
            let mut all = vec![0; tokens * width];
            for (row, codes) in all.chunks_mut(width).zip(codes.chunks(head_dim)) {
                for (to, code) in row.iter_mut().zip(codes) {
                    *to = (code.to_bits() >> 16) as u16;
                }
            }
            all
        };
        // SAFETY: the processor has the instructions.
        let mut products = unsafe { Products::new() };
        let mut digits = Digits::default();
        let poison = Row([0x7fc0; DEPTH]);
        products.right = vec![poison; 4096];
        digits.tiles = vec![poison; 4096];

        let (n, of_tokens) = (tokens + 3, take(tokens));
        let mut scores = vec![f32::NAN; rows * n];
        let keys = padded(head_dim.next_multiple_of(DEPTH));
        // SAFETY: the processor has the instructions.
        unsafe {
            digits.fill(&query, head_dim, rows, &scales[..head_dim]);
            products.with_rows(&digits, &keys, &of_tokens, &mut scores[2..], n);
        }
        let scaled: Vec<f32> = query
            .chunks(head_dim)
            .flat_map(|row| row.iter().zip(&scales).map(|(x, scale)| x * scale).collect::<Vec<_>>())
            .collect();
        for r in 0..rows {
            for t in 0..tokens {
                let of_token = codes[t * head_dim..][..head_dim].iter().copied();
                let of_token = of_token.map(|code| code * of_tokens[t]);
                let pairs = scaled[r * head_dim..].iter().copied().zip(of_token);
                near(&format!("{what}, row {r}, token {t}"), scores[2 + r * n + t], pairs);
            }
            assert!(scores[r * n].is_nan() && scores[r * n + 1].is_nan(), "{what}: others change");
        }

        let weights = take(rows * n);
        let mut out = vec![0.5; rows * head_dim];
        let values = padded(head_dim.next_multiple_of(COLUMNS));
        products.right = vec![poison; 4096];
        // SAFETY: the processor has the instructions.
        unsafe {
            digits.fill(&weights[1..], n, rows, &scales[..tokens]);
            products.with_columns(&digits, &values, &mut out, head_dim);
        }
        for r in 0..rows {
            for c in 0..head_dim {
                let of_channel = codes[c..].iter().step_by(head_dim).copied();
                let weights = weights[1 + r * n..].iter().zip(&scales).map(|(x, scale)| x * scale);
                let pairs = weights.zip(of_channel).chain([(0.5, 1.0)]);
                near(&format!("{what}, row {r}, channel {c}"), out[r * head_dim + c], pairs);
            }
        }
    }
}
