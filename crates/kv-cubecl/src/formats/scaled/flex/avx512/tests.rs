//! Compares sums over codes with sums in f64 over restored numbers.

use std::io::Write;

use super::*;
use crate::{
    GroupOptions, KvFormat, Side,
    formats::{
        blocks::{E2m1Blocks, E4m3Blocks, Mxfp4},
        flex::{CpuCodec, IndexHeads, SCRATCH_ROWS},
        float8::{E4m3, E5m2},
        int8::Int8,
    },
};

/// A generator of pseudorandom numbers.
struct Noise(u64);

impl Noise {
    /// Returns a number from -1 to 1.
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn take(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next()).collect()
    }
}

/// Returns packed random tokens.
///
/// Their magnitude changes from token to token. Some have an outlier channel, which makes the codes
/// of other channels subnormal. Some are all zeros.
fn packed(noise: &mut Noise, format: KvFormat, tokens: usize, head_dim: usize) -> Vec<u32> {
    let place = place(format, tokens, head_dim);
    let mut rows = noise.take(tokens * head_dim);
    for (token, row) in rows.chunks_exact_mut(head_dim).enumerate() {
        let size = 2f32.powi(token as i32 % 9 - 4);
        row.iter_mut().for_each(|x| *x *= size);
        if token % 3 == 1 {
            row[token % head_dim] *= 3000.0;
        }
        if token % 7 == 5 {
            row.fill(0.0);
        }
    }
    let mut words = vec![0; place.words()];
    place.spec.format.on_cpu().quantize(&rows, &mut words, 0, &place);
    words
}

fn place(format: KvFormat, tokens: usize, head_dim: usize) -> PackedLayout {
    let spec = format.spec(Side::Keys, head_dim, GroupOptions::new(32)).unwrap();
    PackedLayout { spec, head_dim, tokens }
}

/// Returns the restored rows of a run in f64.
fn restored(run: &PackedRun<'_>) -> Vec<f64> {
    let mut all = vec![];
    run.restored_tiles(32, |_, rows| all.extend(rows.iter().copied().map(f64::from)));
    all
}

/// Asserts that `got` is as near to the sum of `terms` as rounding in f32 allows.
fn near(what: &str, got: f32, terms: impl Iterator<Item = f64>) {
    let (mut sum, mut size) = (0.0, 0.0);
    for term in terms {
        sum += term;
        size += term.abs();
    }
    let error = (f64::from(got) - sum).abs();
    assert!(error <= 3e-6 * size, "{what}: {got}, not {sum}; magnitudes sum to {size}");
}

fn check<F: Scaled>(format: KvFormat) {
    let mut noise = Noise(11);
    for head_dim in [16, 32, 48, 64, 80, 96, 128, 160, 256] {
        if format.validate(Side::Keys, head_dim, GroupOptions::new(32)).is_err() {
            continue;
        }
        for (room, tokens, n_rows) in [
            (1, 0..1, 1),
            (16, 0..16, 4),
            (21, 0..21, 3),
            (40, 3..39, 2),
            (70, 33..64, 9),
            (700, 0..700, 3),
        ] {
            let what = format!("{format} {head_dim} channels, {tokens:?}, {n_rows} rows");
            let words = packed(&mut noise, format, room, head_dim);
            let place = place(format, room, head_dim);
            let run = PackedRun { words: &words, place, tokens, skipped: 0 };
            let (count, rows) = (run.tokens.len(), restored(&run));
            // Rows of scores may be longer than the run.
            let n = count + 3;
            let query = noise.take(n_rows * head_dim);
            let mut scores = vec![f32::NAN; n_rows * n];
            let mut scratch = vec![f32::NAN; SCRATCH_ROWS * head_dim];
            let scored = score::<F>(&run, &query, &mut scores, n, &mut scratch);
            assert_eq!(scored, room >= LANES, "{what}");
            if !scored {
                run.score_restored(&query, &mut scores, n);
            }
            let weights: Vec<f32> = noise.take(n_rows * n).iter().map(|x| x.abs()).collect();
            let mut o = vec![1.0; n_rows * head_dim];
            assert!(add::<F>(&run, &weights, n, &mut o), "{what}");
            for r in 0..n_rows {
                for (t, row) in rows.chunks_exact(head_dim).enumerate() {
                    let query = &query[r * head_dim..][..head_dim];
                    let terms = row.iter().zip(query).map(|(x, &q)| x * f64::from(q));
                    near(&format!("{what}: score {t} of row {r}"), scores[r * n + t], terms);
                }
                assert!(scores[r * n + count..][..3].iter().all(|x| x.is_nan()), "{what}");
                for c in 0..head_dim {
                    let column = rows.iter().skip(c).step_by(head_dim);
                    let terms = column.zip(&weights[r * n..]).map(|(x, &w)| x * f64::from(w));
                    let terms = terms.chain([1.0]);
                    near(&format!("{what}: channel {c} of row {r}"), o[r * head_dim + c], terms);
                }
            }
        }
    }
}

#[test]
fn sums_over_codes_equal_sums_over_restored_rows() {
    if !available() {
        // Written directly, because the test harness captures `eprintln!`. A test must not fail
        // because standard error is closed.
        let _ = writeln!(std::io::stderr(), "SKIPPED sums over codes: this CPU has no AVX-512");
        return;
    }
    check::<Int8>(KvFormat::Int8);
    check::<E4m3>(KvFormat::E4m3);
    check::<E5m2>(KvFormat::E5m2);
    check::<E4m3Blocks>(KvFormat::E4m3Blocks);
    check::<E4m3Blocks>(KvFormat::E4m3Blocks64);
    check::<E2m1Blocks>(KvFormat::E2m1Blocks);
    check::<Mxfp4>(KvFormat::Mxfp4);
}

/// Queries, weights and scales above [`LARGEST`] take the path over restored rows, where no product
/// overflows.
#[test]
fn large_numbers_use_restored_rows() {
    let head_dim = 64;
    let mut noise = Noise(12);
    let words = packed(&mut noise, KvFormat::E4m3Blocks, 20, head_dim);
    let place = place(KvFormat::E4m3Blocks, 20, head_dim);
    let run = PackedRun { words: &words, place, tokens: 0..20, skipped: 0 };
    let rows = restored(&run);
    let mut scratch = vec![0.0; SCRATCH_ROWS * head_dim];
    for size in [2e9, 1e30, f32::INFINITY, f32::NAN] {
        let mut query = vec![0.0; head_dim];
        query[5] = size;
        let mut scores = [0.0; 20];
        E4m3Blocks.score(&run, &query, &mut scores, 20, &mut scratch);
        for (t, score) in scores.iter().enumerate() {
            let expected = rows[t * head_dim + 5] as f32 * size;
            let same = (score / expected - 1.0).abs() < 1e-6 || *score == expected;
            assert!(same || expected.is_nan() && score.is_nan(), "{score} {expected}");
        }
        let mut weights = [0.0; 20];
        weights[3] = size;
        let mut o = vec![0.0; head_dim];
        E4m3Blocks.add(&run, &weights, 20, &mut o);
        for (o, x) in o.iter().zip(&rows[3 * head_dim..]) {
            let expected = *x as f32 * size;
            let same = (o / expected - 1.0).abs() < 1e-6 || *o == expected;
            assert!(same || expected.is_nan() && o.is_nan(), "{o} {expected}");
        }
    }
    let mut words = vec![0; place.words()];
    let row: Vec<f32> = noise.take(20 * head_dim).iter().map(|x| x * 1e37).collect();
    E4m3Blocks.quantize(&row, &mut words, 0, &place);
    let run = PackedRun { words: &words, place, tokens: 0..20, skipped: 0 };
    let rows = restored(&run);
    let mut o = vec![0.0; head_dim];
    E4m3Blocks.add(&run, &[0.01; 20], 20, &mut o);
    for (c, o) in o.iter().enumerate() {
        let column = rows.iter().skip(c).step_by(head_dim);
        near("large values", *o, column.map(|x| x * f64::from(0.01f32)));
    }
}

/// Queries in f32 are two digits. Digits in bf16 round by less than 2^-14 of a product. Bytes share
/// a unit in a group, so they round by less than 2^-14 of a key times the largest of its query.
/// Queries that were rounded to 4-bit floats are one digit, without rounding; only f32 sums round.
fn check_index_scores(amx: bool) {
    let noise = &mut Noise(5);
    let formats =
        [KvFormat::E2m1Blocks, KvFormat::Mxfp4, KvFormat::E4m3Blocks, KvFormat::E4m3Blocks64];
    for format in formats {
        for (head_dim, heads, tokens) in [
            (32, 1, 16),
            (64, 5, 50),
            (128, 64, 77),
            (128, 5, 200),
            (128, 3, 32),
            (256, 9, 19),
            (256, 70, 100),
        ] {
            if format.validate(Side::Keys, head_dim, GroupOptions::new(32)).is_err() {
                continue;
            }
            for rounds in [false, true] {
                let place = place(format, tokens, head_dim);
                let words = packed(noise, format, tokens, head_dim);
                let first = tokens / 5;
                let run = PackedRun { words: &words, place, tokens: first..tokens - 1, skipped: 0 };
                let mut query = noise.take(heads * head_dim);
                if rounds {
                    let place = self::place(KvFormat::E2m1Blocks, heads, head_dim);
                    let mut words = vec![0; place.words()];
                    E2m1Blocks.quantize(&query, &mut words, 0, &place);
                    E2m1Blocks.restore(&words, 0, &mut query, &place);
                }
                let weights = noise.take(heads);
                let heads = IndexHeads { query: &query, weights: &weights };
                let mut got = vec![f32::NAN; run.tokens.len()];
                let scored = index_scores_of(&run, &heads, &mut got, amx);
                assert_eq!(scored, !amx || head_dim.is_multiple_of(128), "{format} {head_dim}");
                if !scored {
                    continue;
                }
                for (t, key) in restored(&run).chunks_exact(head_dim).enumerate() {
                    let (mut expected, mut size) = (0.0, 0.0);
                    let sum: f64 = key.iter().map(|k| k.abs()).sum();
                    let bytes = !rounds && !amx && place.spec.n_bits == 4;
                    for (query, weight) in query.chunks_exact(head_dim).zip(&weights) {
                        let products = query.iter().zip(key).map(|(q, k)| f64::from(*q) * k);
                        let dot: f64 = products.clone().sum();
                        let largest = query.iter().fold(0.0f32, |a, q| a.max(q.abs()));
                        expected += f64::from(*weight) * dot.max(0.0);
                        size += f64::from(weight.abs())
                            * if bytes {
                                sum * f64::from(largest)
                            } else {
                                products.map(f64::abs).sum()
                            };
                    }
                    let allowed = if rounds { 4e-7 } else { 2f64.powi(-14) } * size;
                    let off = (f64::from(got[t]) - expected).abs();
                    assert!(off <= allowed, "{format} {head_dim} {rounds}: {off} of {size}");
                }
            }
        }
    }
}

fn index_scores_of(
    run: &PackedRun<'_>,
    heads: &IndexHeads<'_>,
    scores: &mut [f32],
    amx: bool,
) -> bool {
    fn of<F: Scaled>(
        run: &PackedRun<'_>,
        heads: &IndexHeads<'_>,
        scores: &mut [f32],
        amx: bool,
    ) -> bool {
        match amx {
            true => amx::index_scores::<F>(run, heads, scores),
            false => index::index_scores::<F>(run, heads, scores),
        }
    }
    match run.place.spec.format {
        Codec::E2m1Blocks => of::<E2m1Blocks>(run, heads, scores, amx),
        Codec::Mxfp4 => of::<Mxfp4>(run, heads, scores, amx),
        _ => of::<E4m3Blocks>(run, heads, scores, amx),
    }
}

#[test]
fn index_scores_match_f64() {
    let bytes = available() && is_x86_feature_detected!("avx512vnni");
    if bytes && is_x86_feature_detected!("avx512bf16") {
        check_index_scores(false);
    } else {
        let _ = writeln!(std::io::stderr(), "SKIPPED scores of keys: this CPU has no bf16 or VNNI");
    }
}

#[test]
fn index_scores_with_amx_match_f64() {
    if simd::amx::available() {
        check_index_scores(true);
        tiny_keys_are_near_zero();
    } else {
        let _ = writeln!(std::io::stderr(), "SKIPPED scores of keys: this CPU has no AMX");
    }
}

/// Keys whose scale is below 2^-117 count as if it were that.
fn tiny_keys_are_near_zero() {
    let (noise, head_dim, tokens) = (&mut Noise(6), 128, 40);
    for exponent in [-100, -116, -122, -126] {
        let place = place(KvFormat::E2m1Blocks, tokens, head_dim);
        let rows: Vec<f32> =
            noise.take(tokens * head_dim).iter().map(|x| x * 2f32.powi(exponent)).collect();
        let mut words = vec![0; place.words()];
        E2m1Blocks.quantize(&rows, &mut words, 0, &place);
        let run = PackedRun { words: &words, place, tokens: 0..tokens, skipped: 0 };
        let (query, weights) = (vec![1.0; head_dim], [1.0]);
        let heads = IndexHeads { query: &query, weights: &weights };
        let mut got = vec![f32::NAN; tokens];
        assert!(amx::index_scores::<E2m1Blocks>(&run, &heads, &mut got));
        for (got, key) in got.iter().zip(restored(&run).chunks_exact(head_dim)) {
            let (expected, size) = (key.iter().sum::<f64>(), key.iter().map(|x| x.abs()));
            let expected = expected.max(0.0);
            let raised = if exponent < -110 { 2f64.powi(-107) * 128.0 } else { 0.0 };
            let allowed = raised + 1e-6 * size.sum::<f64>();
            assert!((f64::from(*got) - expected).abs() <= allowed, "{exponent}: {got} {expected}");
        }
    }
}
