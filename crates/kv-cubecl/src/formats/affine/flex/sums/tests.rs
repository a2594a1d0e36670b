use std::io::Write;

use macerator::{Arch, Simd, WithSimd};

use super::{
    super::{
        quantize::{dequantize_slice, quantize_slice},
        tile::{AddScratch, MAX_ROWS},
        vnni,
    },
    add_rows_impl, score_rows_impl,
};
use crate::{
    formats::{
        Codec, Granularity, GroupRange, QuantSpec,
        affine::Affine,
        flex::{CpuCodec, PackedRun, SCRATCH_ROWS},
    },
    layout::PackedLayout,
    simd::{self, MAX_LANES},
};

fn spec_of(granularity: Granularity, n_bits: u32, group_size: usize) -> QuantSpec {
    let range = GroupRange::MinMax;
    QuantSpec { format: Codec::Affine, granularity, n_bits, group_size, range, tile: None }
}

/// The arguments of both kernels over the same tokens. Results are scores, then outputs.
#[derive(Clone, Copy)]
struct Kernels<'a, const BITS: usize, const ROWS: usize> {
    keys: &'a [u32],
    values: &'a [u32],
    query: &'a [f32],
    weights: &'a [f32],
    tokens: usize,
    head_dim: usize,
    group_size: usize,
}

impl<const BITS: usize, const ROWS: usize> Kernels<'_, BITS, ROWS> {
    fn in_integers(self) -> [Vec<f32>; 2] {
        let Self { keys, values, query, weights, tokens, head_dim: d, group_size: g } = self;
        let n = tokens;
        // NaN marks elements that the kernel fails to write.
        let mut scores = vec![f32::NAN; ROWS * tokens];
        let mut o = vec![0.0; ROWS * d];
        let scratch = &mut vec![f32::NAN; SCRATCH_ROWS * d];
        vnni::score_rows::<BITS, ROWS>(keys, query, &mut scores, n, tokens, d, g, scratch);
        let add = &mut AddScratch::default();
        vnni::add_rows::<BITS, ROWS>(values, n, weights, n, &mut o, d, g, add);
        [scores, o]
    }
}

impl<const BITS: usize, const ROWS: usize> WithSimd for Kernels<'_, BITS, ROWS> {
    type Output = [Vec<f32>; 2];

    #[inline(always)]
    fn with_simd<S: Simd>(self) -> Self::Output {
        let Self { keys, values, query, weights, tokens, head_dim: d, group_size: g } = self;
        let n = tokens;
        // NaN marks elements that the kernel fails to write.
        let mut scores = vec![f32::NAN; ROWS * tokens];
        let mut o = vec![0.0; ROWS * d];
        let scratch = &mut vec![f32::NAN; SCRATCH_ROWS * d];
        score_rows_impl::<S, BITS, ROWS>(keys, query, &mut scores, n, tokens, d, g, scratch);
        let add = &mut AddScratch::default();
        add_rows_impl::<S, BITS, ROWS>(values, n, weights, n, &mut o, d, g, add);
        [scores, o]
    }
}

/// Compares the kernels for every vector extension that this CPU has with f64 sums over restored
/// tokens. Numbers of tokens lie around multiples of vectors, groups and tiles.
fn check<const BITS: usize, const ROWS: usize>(head_dim: usize, group_size: usize) {
    for tokens in [1usize, 31, 32, 37, 64, 97, 160, 199] {
        check_tokens::<BITS, ROWS>(tokens, head_dim, group_size);
    }
}

fn check_tokens<const BITS: usize, const ROWS: usize>(
    tokens: usize,
    head_dim: usize,
    group_size: usize,
) {
    // Factors of the second row differ by many orders of magnitude.
    let wide = |row: usize, i: usize| if row == 1 { 10f32.powi(i as i32 % 9 - 6) } else { 1.0 };
    let mut query = wave(ROWS * head_dim, 0.7);
    let mut weights: Vec<f32> = wave(ROWS * tokens, 1.3).iter().map(|x| x.abs()).collect();
    query.iter_mut().enumerate().for_each(|(i, x)| *x *= wide(i / head_dim, i));
    weights.iter_mut().enumerate().for_each(|(i, x)| *x *= wide(i / tokens, i));
    let spec = |granularity| {
        let n_bits = BITS as u32;
        spec_of(granularity, n_bits, group_size)
    };
    let whole = tokens.next_multiple_of(group_size);
    let keys = packed(&spec(Granularity::PerChannel), whole, head_dim);
    let values = packed(&spec(Granularity::PerToken), tokens, head_dim);
    let key = |t: usize, c: usize| f64::from(keys.1[t * head_dim + c]);
    let value = |t: usize, c: usize| f64::from(values.1[t * head_dim + c]);
    let scores: Vec<f64> = (0..ROWS * tokens)
        .map(|i| {
            let (r, t) = (i / tokens, i % tokens);
            (0..head_dim).map(|c| f64::from(query[r * head_dim + c]) * key(t, c)).sum()
        })
        .collect();
    let outputs: Vec<f64> = (0..ROWS * head_dim)
        .map(|i| {
            let (r, c) = (i / head_dim, i % head_dim);
            (0..tokens).map(|t| f64::from(weights[r * tokens + t]) * value(t, c)).sum()
        })
        .collect();
    let kernels = Kernels::<BITS, ROWS> {
        keys: &keys.0,
        values: &values.0,
        query: &query,
        weights: &weights,
        tokens,
        head_dim,
        group_size,
    };
    for (arch, actual) in on_every_extension(kernels) {
        let what = format!(
            "{arch}, {BITS} bits, head_dim {head_dim}, group {group_size}, {tokens} tokens"
        );
        assert_near::<ROWS>(&format!("{what}: scores"), &actual[0], &scores);
        assert_near::<ROWS>(&format!("{what}: output"), &actual[1], &outputs);
    }
}

fn wave(len: usize, pitch: f32) -> Vec<f32> {
    (0..len).map(|i| (i as f32 * pitch).sin() + 0.3 * (i % 7) as f32).collect()
}

/// Returns the words of quantized tokens, and the numbers they are restored to.
fn packed(spec: &QuantSpec, tokens: usize, head_dim: usize) -> (Vec<u32>, Vec<f32>) {
    let input = wave(tokens * head_dim, 0.37);
    let mut words = vec![0; spec.words(tokens, head_dim)];
    quantize_slice(&input, &mut words, head_dim, spec);
    let mut restored = vec![0.0; input.len()];
    dequantize_slice(&words, &mut restored, head_dim, spec);
    (words, restored)
}

/// Returns the results of the kernels for each vector extension that this CPU has and that computes
/// as many rows together.
fn on_every_extension<const BITS: usize, const ROWS: usize>(
    kernels: Kernels<'_, BITS, ROWS>,
) -> Vec<(String, [Vec<f32>; 2])> {
    let archs = ARCHS.into_iter().filter(|arch| available(*arch) && ROWS <= MAX_ROWS);
    // SAFETY: the CPU has the extension.
    let in_floats = archs.map(|arch| (format!("{arch:?}"), unsafe { arch.dispatch(kernels) }));
    let in_integers = simd::vnni::available().then(|| ("VNNI".to_owned(), kernels.in_integers()));
    in_floats.chain(in_integers).collect()
}

/// Compares rows with the error that f32 sums of up to 256 products have, each rounded to 6e-8.
fn assert_near<const ROWS: usize>(what: &str, actual: &[f32], expected: &[f64]) {
    let rows = actual.chunks(actual.len() / ROWS).zip(expected.chunks(expected.len() / ROWS));
    for (row, (actual, expected)) in rows.enumerate() {
        let largest = expected.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        for (i, (actual, expected)) in actual.iter().zip(expected).enumerate() {
            let error = (f64::from(*actual) - expected).abs();
            assert!(error <= 2e-6 * largest, "{what}[{row}, {i}] is {actual}, not {expected}");
        }
    }
}

const ARCHS: [Arch; 4] = [Arch::Scalar, Arch::V2, Arch::V3, Arch::V4];

/// Reports the vector extensions that this CPU lacks. Written to standard error directly, because
/// the test harness captures `eprintln!`.
fn report_missing_extensions() {
    let test = std::thread::current().name().unwrap_or("test").to_string();
    let archs = ARCHS.iter().filter(|arch| !available(**arch)).map(|arch| format!("{arch:?}"));
    let vnni = (!simd::vnni::available()).then(|| "VNNI".to_string());
    for missing in archs.chain(vnni) {
        // A test must not fail because standard error is closed.
        let _ = writeln!(std::io::stderr(), "SKIPPED {test}: this CPU has no {missing}");
    }
}

fn available(arch: Arch) -> bool {
    match arch {
        Arch::Scalar => true,
        Arch::V2 => is_x86_feature_detected!("sse4.2"),
        Arch::V3 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
        Arch::V4 => simd::lanes() == MAX_LANES,
        _ => false,
    }
}

#[test]
fn sums_over_codes_equal_sums_over_restored_tokens_on_every_extension() {
    report_missing_extensions();
    check::<2, 3>(96, 32);
    check::<3, 3>(96, 32);
    check::<4, 3>(96, 32);
    check::<8, 3>(96, 32);
}

#[test]
fn sums_over_codes_equal_sums_over_restored_tokens_in_every_shape() {
    report_missing_extensions();
    check::<2, 1>(64, 64);
    check::<2, 4>(80, 16);
    check::<3, 1>(64, 64);
    check::<3, 2>(256, 128);
    check::<3, 4>(32, 32);
    check::<4, 2>(128, 16);
    check::<4, 4>(16, 16);
    check::<8, 1>(256, 128);
    check::<8, 2>(48, 16);
    check::<2, 5>(64, 16);
    check::<3, 7>(96, 32);
    check::<4, 8>(64, 32);
    check::<8, 6>(32, 32);
}

/// The scratch memory in which values are widened has room for lines up to some length.
#[test]
fn split_codes_of_very_wide_heads() {
    let (tokens, head_dim) = (40, 2048);
    let spec = |granularity| spec_of(granularity, 3, 32);
    let (query, weights) = (wave(head_dim, 0.7), wave(tokens, 1.3));
    for granularity in [Granularity::PerChannel, Granularity::PerToken] {
        let spec = spec(granularity);
        let whole = tokens.next_multiple_of(spec.block_tokens());
        let (words, _) = packed(&spec, whole, head_dim);
        let place = PackedLayout { spec, head_dim, tokens: whole };
        let run = PackedRun { words: &words, place, tokens: 0..tokens, skipped: 0 };
        let mut results = [vec![0.0; head_dim], vec![0.0; head_dim]];
        let [actual, expected] = &mut results;
        if granularity == Granularity::PerChannel {
            let scratch = &mut vec![f32::NAN; SCRATCH_ROWS * head_dim];
            Affine.score(&run, &query, actual, tokens, scratch);
            run.score_restored(&query, expected, tokens);
        } else {
            Affine.add(&run, &weights, tokens, actual);
            run.add_restored(&weights, tokens, expected);
        }
        let expected: Vec<f64> = expected.iter().map(|&x| x.into()).collect();
        assert_near::<1>(&format!("{granularity:?}"), actual, &expected);
    }
}

#[test]
fn integer_kernels_preserve_zeros_and_nonfinite_numbers() {
    if !simd::vnni::available() {
        return report_missing_extensions();
    }
    const TOKENS: usize = 64;
    const HEAD_DIM: usize = 96;
    const GROUP: usize = 32;
    const ROWS: usize = 3;
    let spec = |granularity| spec_of(granularity, 4, GROUP);
    let input: Vec<f32> = (0..TOKENS * HEAD_DIM).map(|i| (i as f32 * 0.37).sin()).collect();
    let [keys, values] = [Granularity::PerChannel, Granularity::PerToken].map(|granularity| {
        let mut words = vec![0; spec(granularity).words(TOKENS, HEAD_DIM)];
        quantize_slice(&input, &mut words, HEAD_DIM, &spec(granularity));
        words
    });
    let nothing = Kernels::<4, ROWS> {
        keys: &keys,
        values: &values,
        query: &[0.0; ROWS * HEAD_DIM],
        weights: &[0.0; ROWS * TOKENS],
        tokens: TOKENS,
        head_dim: HEAD_DIM,
        group_size: GROUP,
    };
    assert!(nothing.in_integers().iter().flatten().all(|&x| x == 0.0));
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let (mut query, mut weights) = ([1.0; ROWS * HEAD_DIM], [1.0; ROWS * TOKENS]);
        query[HEAD_DIM + 7] = bad;
        weights[TOKENS + 7] = bad;
        let kernels = Kernels { query: &query, weights: &weights, ..nothing };
        for rows in kernels.in_integers() {
            let len = rows.len() / ROWS;
            for (i, x) in rows.iter().enumerate() {
                assert_eq!(x.is_finite(), i / len != 1, "{bad}: element {i} is {x}");
            }
        }
    }
}
