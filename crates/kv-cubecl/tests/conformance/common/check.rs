//! Comparisons.

use burn::tensor::{Tensor, kind::Basic};
use kv_cubecl::KvCache;

use super::Host;

/// Tolerance of f32 results against f64, relative to the largest magnitude expected. Attention sums
/// some hundreds of products of order one, each with relative error 6e-8, which gives an error of
/// about 1e-6; ten times that leaves the order of summation free.
pub(crate) const CLOSE: f64 = 1e-5;

/// Asserts that all of `got` is finite and within `tolerance` times the largest magnitude of
/// `want`.
#[track_caller]
pub(crate) fn close(what: impl core::fmt::Display, got: &Host, want: &[f64], tolerance: f64) {
    assert_eq!(got.data.len(), want.len(), "{what}: number of elements");
    let largest = want.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    let mut worst = (0.0, 0);
    for (index, (&got, want)) in got.data.iter().zip(want).enumerate() {
        assert!(got.is_finite(), "{what}: element {index} is {got}, expected {want}");
        let error = (f64::from(got) - want).abs();
        if error > worst.0 {
            worst = (error, index);
        }
    }
    let (error, index) = worst;
    assert!(
        error <= tolerance * largest,
        "{what}: element {index} of {:?} is {}, expected {}: off by {:.2e} of the largest \
         magnitude {largest:.3e}, allowed {tolerance:.0e}",
        got.shape,
        got.data[index],
        want[index],
        error / largest,
    );
}

/// Asserts equality bit for bit.
#[track_caller]
pub(crate) fn equal_bits(what: impl core::fmt::Display, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(got.to_bits() == want.to_bits(), "{what}: element {index} is {got}, not {want}");
    }
}

/// All of a tensor's bytes.
fn bits<const D: usize, K: Basic>(tensor: Tensor<D, K>) -> Vec<u8> {
    tensor.into_data().as_bytes().to_vec()
}

/// Everything a cache holds, used or not, to compare bit for bit.
pub(crate) fn snapshot(cache: &KvCache) -> [Vec<u8>; 4] {
    let parts = cache.clone().into_parts();
    let len = parts.lens.iter().flat_map(|len| len.to_le_bytes()).collect();
    [bits(parts.keys), bits(parts.values), bits(parts.floats), len]
}

/// Compares everything that two caches hold, and reports the first words that differ.
#[track_caller]
pub(crate) fn same_contents(what: impl core::fmt::Display, got: &KvCache, expected: &KvCache) {
    let parts = snapshot(got).into_iter().zip(snapshot(expected));
    for ((got, expected), part) in parts.zip(["keys", "values", "floats", "lengths"]) {
        assert_eq!(got.len(), expected.len(), "{what}: {part}");
        let words = |bytes: &[u8]| -> Vec<u32> {
            bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
        };
        let pairs = words(&got).into_iter().zip(words(&expected)).enumerate();
        let differ: Vec<_> = pairs.filter(|(_, (got, expected))| got != expected).collect();
        let first = &differ[..differ.len().min(3)];
        assert!(differ.is_empty(), "{what}: {} words of {part} differ: {first:x?}", differ.len());
    }
}

/// Returns the central differences of `loss` by each number of the input `which`.
#[cfg(feature = "autodiff")]
pub(crate) fn slopes<const N: usize>(
    inputs: &[Vec<f64>; N],
    which: usize,
    step: f64,
    loss: impl Fn(&[Vec<f64>; N]) -> f64,
) -> Vec<f64> {
    let mut moved = inputs.clone();
    let slope = |index: usize| {
        let x = inputs[which][index];
        let mut at = |x| {
            moved[which][index] = x;
            loss(&moved)
        };
        let slope = (at(x + step) - at(x - step)) / (2.0 * step);
        moved[which][index] = x;
        slope
    };
    (0..inputs[which].len()).map(slope).collect()
}
