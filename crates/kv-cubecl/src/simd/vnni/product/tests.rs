use std::io::Write;

use super::*;
use crate::simd::vnni::available;

/// Numbers from -1 to 1.
fn noise(seed: &mut u64) -> f32 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// Compares a sum of products, added to `start`, with f64. A factor is off by at most half a unit,
/// 1.01 * 2^-23 of the largest factor of its row. A few roundings of the sum to f32 are added.
fn near(
    what: &str,
    got: f32,
    largest: f32,
    start: f32,
    products: impl Iterator<Item = (f32, f32)>,
) {
    let (mut sum, mut codes) = (f64::from(start), 0.0);
    for (factor, code) in products {
        sum += f64::from(factor) * f64::from(code);
        codes += f64::from(code).abs();
    }
    let of_factors = f64::from(largest) * codes * 1.01 * 2f64.powi(-23);
    let most = of_factors + (sum.abs() + f64::from(start.abs())) * 2f64.powi(-21);
    let off = (f64::from(got) - sum).abs();
    assert!(off <= most, "{what}: {got} for {sum}, off by {off} of {most}");
}

struct Case {
    rows: usize,
    tokens: usize,
    head_dim: usize,
    codes: Vec<i8>,
    words: Vec<u32>,
    scales: Vec<f32>,
}

impl Case {
    fn new([rows, tokens, head_dim]: [usize; 3], seed: &mut u64) -> Self {
        let codes: Vec<i8> =
            (0..tokens * head_dim).map(|_| (noise(seed) * 128.4).round() as i8).collect();
        let words = codes.as_chunks::<4>().0.iter().map(|x| u32::from_le_bytes(x.map(|x| x as u8)));
        let scales = (0..tokens.max(head_dim)).map(|_| noise(seed)).collect();
        Self { rows, tokens, head_dim, words: words.collect(), codes, scales }
    }

    /// Computes `[scores, outputs]` in memory that held other numbers before.
    fn products(&self, query: &[f32], weights: &[f32], n: usize) -> [Vec<f32>; 2] {
        let Self { rows, tokens, head_dim, words, scales, .. } = self;
        let mut digits = Digits { words: vec![f32::NAN; 9999], ..Digits::default() };
        let mut panel = Panel { codes: vec![Codes([u32::MAX; LANES]); 999], ..Panel::default() };
        let width = head_dim / QUAD;
        let mut scores = vec![f32::NAN; rows * n];
        let mut out: Vec<f32> = (0..rows * head_dim).map(|i| start(i / head_dim)).collect();
        // SAFETY: the test has asked for the instructions.
        unsafe {
            digits.fill(query, *head_dim, *rows, &vec![1.0; *head_dim]);
            panel.fill_columns(words, width, *tokens);
            panel.multiply(&digits, Some(&scales[..*tokens]), &mut scores[2..], n, words);
            digits.fill(&weights[2..], n, *rows, &scales[..*tokens]);
            panel.fill_rows(words, width, *tokens);
            panel.multiply(&digits, None, &mut out, *head_dim, &[]);
        }
        [scores, out]
    }
}

/// Returns the factor of a row's numbers: the second row is a billion times smaller than others.
fn size(row: usize) -> f32 {
    if row == 1 { 1e-9 } else { 1.0 }
}

/// Returns what the products of a row are added to.
fn start(row: usize) -> f32 {
    0.5 * size(row)
}

fn has_instructions(what: &str) -> bool {
    if !available() {
        let _ = writeln!(std::io::stderr(), "SKIPPED {what}: this CPU has no VNNI");
    }
    available()
}

#[test]
fn products_match_f64() {
    if !has_instructions("products") {
        return;
    }
    let seed = &mut 7;
    for rows in [1, 3, 4, 17, 64] {
        for (tokens, head_dim) in
            [(1, 8), (5, 32), (16, 40), (63, 64), (64, 100), (129, 80), (256, 256), (2, 4096)]
        {
            let case = Case::new([rows, tokens, head_dim], seed);
            let n = tokens + 3;
            let mut row = |i: usize, width: usize| noise(seed) * size(i / width);
            let query: Vec<f32> = (0..rows * head_dim).map(|i| row(i, head_dim)).collect();
            let weights: Vec<f32> = (0..rows * n).map(|i| row(i, n)).collect();
            let [scores, out] = case.products(&query, &weights, n);
            check(&case, &query, &weights, &scores, &out);
        }
    }
}

fn check(case: &Case, query: &[f32], weights: &[f32], scores: &[f32], out: &[f32]) {
    let Case { rows, tokens, head_dim, codes, scales, .. } = case;
    let (rows, tokens, head_dim, n) = (*rows, *tokens, *head_dim, tokens + 3);
    let what = format!("{rows} rows, {tokens} tokens, {head_dim} channels");
    for r in 0..rows {
        let query = &query[r * head_dim..][..head_dim];
        let largest = query.iter().fold(0.0, |a: f32, x| a.max(x.abs()));
        for t in 0..tokens {
            let of_token = codes[t * head_dim..][..head_dim].iter();
            let of_token = of_token.map(|&code| f32::from(code) * scales[t]);
            let pairs = query.iter().copied().zip(of_token);
            let got = scores[2 + r * n + t];
            near(&format!("{what}, row {r}, token {t}"), got, largest, 0.0, pairs);
        }
        // A row of scores has room for two numbers before its tokens and one after them.
        for other in [0, 1, n - 1] {
            assert!(scores[r * n + other].is_nan(), "{what}: {other} of row {r} changes");
        }
        let weights: Vec<f32> = weights[2 + r * n..][..tokens]
            .iter()
            .zip(&scales[..tokens])
            .map(|(x, scale)| x * scale)
            .collect();
        let largest = weights.iter().fold(0.0, |a: f32, x| a.max(x.abs()));
        for c in 0..head_dim {
            let of_channel = codes[c..].iter().step_by(head_dim).map(|&code| f32::from(code));
            let pairs = weights.iter().copied().zip(of_channel);
            let got = out[r * head_dim + c];
            near(&format!("{what}, row {r}, channel {c}"), got, largest, start(r), pairs);
        }
    }
}

#[test]
fn only_rows_with_numbers_that_are_not_finite_become_nan() {
    if !has_instructions("numbers that are not finite") {
        return;
    }
    let case = Case::new([6, 40, 32], &mut 3);
    let n = case.tokens + 3;
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let (mut query, mut weights) = (vec![1.0; 6 * case.head_dim], vec![1.0; 6 * n]);
        query[4 * case.head_dim + 7] = bad;
        weights[2 + 4 * n + 7] = bad;
        let [scores, out] = case.products(&query, &weights, n);
        for r in 0..6 {
            let scores = &scores[2 + r * n..][..case.tokens];
            assert!(scores.iter().all(|x| x.is_nan() == (r == 4)), "{bad}, scores of row {r}");
            let out = &out[r * case.head_dim..][..case.head_dim];
            assert!(out.iter().all(|x| x.is_nan() == (r == 4)), "{bad}, output of row {r}");
        }
    }
    let zeros = vec![0.0; 6 * case.head_dim.max(n)];
    let [scores, out] = case.products(&zeros, &zeros, n);
    assert!(scores[2..][..case.tokens].iter().all(|&x| x == 0.0));
    assert!(out.iter().enumerate().all(|(i, &x)| x == start(i / case.head_dim)));
}
