//! Selection of the highest scores on the device, against a sort on the host.

use burn::{
    backend::Dispatch,
    tensor::{DType, Int, Tensor, TensorData},
};
use kv_cubecl::{
    On, Target,
    sparse::{Compression, SparseOps},
};

use crate::common::{Rng, stamp};

stamp!(
    the_highest_scores_are_selected_in_order,
    equal_scores_are_selected_from_the_first_on,
    as_many_entries_as_a_million_tokens_have,
);

/// Returns what is selected for each token of each sequence: `[batch][tokens][top_k]`.
fn selected<T: Target>(
    on: &On<T>,
    scores: &[f32],
    [batch, tokens, n]: [usize; 3],
    span: &[i32],
    ratio: usize,
    top_k: usize,
) -> Vec<i32> {
    let scores = TensorData::new(scores.to_vec(), [batch, tokens, n]);
    let scores = Tensor::<3>::from_data(scores, &**on).into_dispatch();
    let span = TensorData::new(span.to_vec(), [2, batch]);
    let span = Tensor::<2, Int>::from_data(span, (&**on, DType::I32)).into_dispatch();
    let compression = Compression::new(ratio);
    let selected = <Dispatch as SparseOps>::top_entries(scores, span, compression, top_k);
    let selected: Tensor<3, Int> = Tensor::from_dispatch(selected);
    assert_eq!(selected.dims(), [batch, tokens, top_k]);
    selected.into_data().iter::<i32>().collect()
}

/// Sorts by score, NaN last, then by number.
fn expected(scores: &[f32], top_k: usize) -> Vec<i32> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    let key = |i: usize| if scores[i].is_nan() { f32::NEG_INFINITY } else { scores[i] };
    order.sort_by(|&a, &b| key(b).partial_cmp(&key(a)).unwrap().then(a.cmp(&b)));
    let mut kept: Vec<i32> = order.into_iter().take(top_k).map(|i| i as i32).collect();
    kept.sort_unstable();
    kept.resize(top_k, -1);
    kept
}

/// Sequences of different lengths, one without part in the call, tokens past the end of a sequence,
/// and more places than entries.
fn the_highest_scores_are_selected_in_order<T: Target>(on: &On<T>) {
    let rng = &mut Rng::new(11);
    for (n, tokens, ratio, top_k) in
        [(1usize, 1usize, 4, 3), (40, 5, 1, 7), (300, 3, 2, 300), (1000, 2, 4, 64), (700, 4, 3, 1)]
    {
        let batch = 3;
        let scores: Vec<f32> = (0..batch * tokens * n).map(|_| rng.normal()).collect();
        let starts = [n * ratio - tokens, n * ratio / 3, 5];
        let counts = [tokens, tokens.div_ceil(2), 0];
        let span: Vec<i32> = starts.iter().chain(&counts).map(|&x| x as i32).collect();
        let got = selected(on, &scores, [batch, tokens, n], &span, ratio, top_k);
        for (row, got) in got.chunks(top_k).enumerate() {
            let (sequence, token) = (row / tokens, row % tokens);
            let seen = match token < counts[sequence] {
                true => (starts[sequence] + token + 1) / ratio,
                false => 0,
            };
            let want = expected(&scores[row * n..][..seen.min(n)], top_k);
            assert_eq!(got, want, "{n} entries, sequence {sequence}, token {token}");
        }
        let none = selected(on, &scores[..tokens * n], [1, tokens, n], &[-1, 4], ratio, top_k);
        assert!(none.iter().all(|&id| id == -1), "a sequence that takes no part");
    }
}

/// Zeros of both signs are equal, infinities are the extremes, and a NaN is below all.
fn equal_scores_are_selected_from_the_first_on<T: Target>(on: &On<T>) {
    let rng = &mut Rng::new(12);
    let values = [0.0, -0.0, 1.0, -1.0, f32::INFINITY, f32::MIN, f32::NAN, -f32::NAN, 1e-40];
    for top_k in [1, 2, 5, 17, 99, 499] {
        let scores: Vec<f32> = (0..500).map(|_| values[rng.below(values.len())]).collect();
        // Some devices flush subnormal numbers to 0, so both are equal here.
        let flushed: Vec<f32> =
            scores.iter().map(|x| if x.is_subnormal() { 0.0 } else { *x }).collect();
        let got = selected(on, &flushed, [1, 1, 500], &[499, 1], 1, top_k);
        assert_eq!(got, expected(&flushed, top_k), "top {top_k}");
    }
}

/// Another port's kernel crashed at 32k entries. A million tokens at ratio 4 are 262,144.
fn as_many_entries_as_a_million_tokens_have<T: Target>(on: &On<T>) {
    let rng = &mut Rng::new(13);
    let n = 1 << 18;
    let scores: Vec<f32> = (0..n).map(|_| rng.normal()).collect();
    let got = selected(on, &scores, [1, 1, n], &[(4 * n - 1) as i32, 1], 4, 1024);
    assert_eq!(got, expected(&scores, 1024));
    let rising: Vec<f32> = (0..n).map(|i| i as f32).collect();
    let got = selected(on, &rising, [1, 1, n], &[(4 * n - 1) as i32, 1], 4, 512);
    assert_eq!(got, (n as i32 - 512..n as i32).collect::<Vec<_>>());
}
