//! How many of the entries that exact keys select are also selected by keys of few bits.

use std::collections::HashSet;

use burn::tensor::{Tensor, TensorData};
use kv_cubecl::{
    KvFormat, On, Target, hadamard,
    sparse::{Compression, IndexQuery, RowFormat, index_scores, select_entries},
};

use crate::common::{Rng, stamp};

stamp!(keys_of_few_bits_select_what_exact_keys_select);

/// Channels of a key, and the channels that are outliers in every key.
const WIDTH: usize = 128;
const OUTLIERS: [usize; 3] = [3, 70, 101];
/// Tokens that select, and heads of each.
const TOKENS: usize = 4;
const HEADS: usize = 64;

/// Independent normal keys are the hardest case: scores are as dense as can be where the selection
/// ends, so that the least rounding changes it, and the more so the smaller the share of entries
/// that is selected. The bounds are what such keys allow, less a margin of a few hundredths for
/// another seed.
#[allow(clippy::print_stdout, reason = "the recall is seen with --nocapture")]
fn keys_of_few_bits_select_what_exact_keys_select<T: Target>(on: &On<T>) {
    let sizes: &[usize] = match T::NAME {
        "flex" => &[1 << 10, 16 << 10, 64 << 10, 256 << 10],
        _ => &[1 << 10],
    };
    for &n in sizes {
        for outliers in [false, true] {
            let recall = recalls(on, n, outliers);
            let [eight, four, four_hadamard, int8_hadamard] = recall;
            println!(
                "{n} keys, outliers: {outliers}: E4M3 {eight:.3}, E2M1 {four:.3}, after Hadamard \
                 E2M1 {four_hadamard:.3}, int8 {int8_hadamard:.3}"
            );
            let [least_eight, least_four] = if n > 16 << 10 { [0.88, 0.76] } else { [0.92, 0.84] };
            assert!(eight >= least_eight, "{n} keys in 8 bits: {recall:?}");
            assert!(four_hadamard >= least_four, "{n} keys in 4 bits after Hadamard: {recall:?}");
            // Of as many bits as E4M3, but with equal steps: a transformed key has no outlier.
            assert!(int8_hadamard >= 0.98, "{n} keys as bytes after Hadamard: {recall:?}");
            // The transform spreads outliers over all channels.
            assert!(!outliers || four_hadamard >= four + 0.06, "{n} keys: {recall:?}");
        }
    }
}

/// Returns the recall of E4M3 keys, of E2M1 keys without and with the Hadamard transform, and of
/// signed bytes with it.
fn recalls<T: Target>(on: &On<T>, n: usize, outliers: bool) -> [f64; 4] {
    let rng = &mut Rng::new(7);
    let mut tensor = |shape: [usize; 4]| {
        let mut numbers: Vec<f32> = (0..shape.iter().product()).map(|_| rng.normal()).collect();
        for row in numbers.chunks_exact_mut(WIDTH).filter(|_| outliers) {
            OUTLIERS.into_iter().for_each(|channel| row[channel] *= 8.0);
        }
        Tensor::<4>::from_data(TensorData::new(numbers, shape), &**on)
    };
    let (keys, query) = (tensor([1, 1, n, WIDTH]), tensor([1, HEADS, TOKENS, WIDTH]));
    let weights: Vec<f32> = (0..TOKENS * HEADS).map(|_| rng.normal().abs()).collect();
    let weights = TensorData::new(weights, [1, TOKENS, HEADS]);
    let weights = Tensor::<3>::from_data(weights, &**on);
    let select = |query: &Tensor<4>, keys: &Tensor<4>| {
        let index = IndexQuery { query: query.clone(), weights: weights.clone() };
        let scores = index_scores(&index, keys).unwrap();
        // Every token sees all keys.
        let selection = select_entries(scores, n, Compression::new(1), 512.min(n / 4)).unwrap();
        let top_k = selection.indices().dims()[2];
        let ids: Vec<i64> = selection.indices().clone().into_data().iter::<i64>().collect();
        ids.chunks(top_k).map(|ids| ids.iter().copied().collect()).collect::<Vec<HashSet<_>>>()
    };
    let want = select(&query, &keys);
    let recall = |format, transforms: bool| {
        let turned = |x: &Tensor<4>| match transforms {
            true => hadamard(x.clone()).unwrap(),
            false => x.clone(),
        };
        let got = select(&turned(&query), &RowFormat::codes(format).rounded(turned(&keys)));
        let pairs = want.iter().zip(&got);
        let hits: usize = pairs.map(|(want, got)| want.intersection(got).count()).sum();
        hits as f64 / want.iter().map(HashSet::len).sum::<usize>() as f64
    };
    [
        recall(KvFormat::E4m3Blocks, false),
        recall(KvFormat::E2m1Blocks, false),
        recall(KvFormat::E2m1Blocks, true),
        recall(KvFormat::Int8, true),
    ]
}
