//! Scores of an indexer's keys. Lanes are heads, so that one load of a key's channel serves a
//! vector of heads, and the sum over heads is the only one across lanes.

use macerator::{Scalar, Simd, Vector};

use super::{MAX_LANES, lanes, load, store};

/// Vectors of heads whose products are in registers together.
const VECTORS: usize = 2;

/// Keys whose products are in registers together.
const KEYS: usize = 4;

/// The heads of an indexer for one token, as lanes of vectors.
pub(crate) struct HeadLanes {
    /// By panel of [`VECTORS`] vectors of heads, `[head_dim, panel]`.
    query: Vec<f32>,
    /// Padded with zeros to whole panels.
    weights: Vec<f32>,
    heads: usize,
}

impl HeadLanes {
    /// Takes queries, `[heads, head_dim]`, and weights, `[heads]`.
    pub(crate) fn new(query: &[f32], weights: &[f32]) -> Self {
        let (heads, panel) = (weights.len(), VECTORS * lanes());
        let (padded, head_dim) = (heads.next_multiple_of(panel), query.len() / heads);
        let mut by_lane = vec![0.0; padded * head_dim];
        for (head, query) in query.chunks_exact(head_dim).enumerate() {
            let first = head / panel * panel * head_dim + head % panel;
            by_lane[first..].iter_mut().step_by(panel).zip(query).for_each(|(to, &x)| *to = x);
        }
        let mut all = vec![0.0; padded];
        all[..heads].copy_from_slice(weights);
        Self { query: by_lane, weights: all, heads }
    }

    /// Computes the scores of `keys`, `[scores.len(), head_dim]`: the sum over heads of the weight
    /// times the ReLU of the product.
    pub(crate) fn score(&self, keys: &[f32], scores: &mut [f32]) {
        score_panels(self, keys, scores);
    }
}

#[macerator::with_simd]
fn score_panels<S: Simd>(heads: &HeadLanes, keys: &[f32], scores: &mut [f32]) {
    let panel = VECTORS * f32::lanes::<S>();
    let head_dim = heads.query.len() / heads.weights.len();
    scores.fill(0.0);
    let panels = heads.query.chunks_exact(panel * head_dim);
    for (nth, (query, weights)) in panels.zip(heads.weights.chunks_exact(panel)).enumerate() {
        let real = panel.min(heads.heads - nth * panel);
        let quads = keys.chunks_exact(KEYS * head_dim);
        let (rest, first) = (quads.remainder(), quads.len() * KEYS);
        for (keys, scores) in quads.zip(scores.chunks_exact_mut(KEYS)) {
            let dots = products::<S, KEYS>(query, keys, head_dim);
            for (dots, score) in dots.into_iter().zip(scores) {
                *score += weighed::<S>(dots, weights, real);
            }
        }
        for (key, score) in rest.chunks_exact(head_dim).zip(&mut scores[first..]) {
            let [dots] = products::<S, 1>(query, key, head_dim);
            *score += weighed::<S>(dots, weights, real);
        }
    }
}

/// Returns the products of a panel of heads with `N` keys.
#[inline(always)]
fn products<S: Simd, const N: usize>(
    query: &[f32],
    keys: &[f32],
    head_dim: usize,
) -> [[Vector<S, f32>; VECTORS]; N] {
    let lanes = f32::lanes::<S>();
    let keys: [&[f32]; N] = core::array::from_fn(|i| &keys[i * head_dim..][..head_dim]);
    let mut sums = [[0.0f32.splat::<S>(); VECTORS]; N];
    for (channel, query) in (0..head_dim).zip(query.chunks_exact(VECTORS * lanes)) {
        let mut vectors = [0.0f32.splat::<S>(); VECTORS];
        for (vector, query) in vectors.iter_mut().zip(query.chunks_exact(lanes)) {
            *vector = load(query);
        }
        for (sums, key) in sums.iter_mut().zip(keys) {
            let x = key[channel].splat::<S>();
            for (sum, query) in sums.iter_mut().zip(vectors) {
                *sum = query.mul_add(x, *sum);
            }
        }
    }
    sums
}

/// Returns the sum of the products above 0, times their weights, of the first `real` heads.
#[inline(always)]
fn weighed<S: Simd>(dots: [Vector<S, f32>; VECTORS], weights: &[f32], real: usize) -> f32 {
    let lanes = f32::lanes::<S>();
    let zero = 0.0f32.splat::<S>();
    if real == weights.len() {
        let mut sum = zero;
        for (dots, weights) in dots.into_iter().zip(weights.chunks_exact(lanes)) {
            // x86 returns the second operand of `max` if one is NaN, so that NaN stays NaN.
            sum = zero.max(dots).mul_add(load(weights), sum);
        }
        return sum.reduce_add();
    }
    // A lane without a head must not add the product of its weight 0 and an infinity.
    let mut all = [0.0; VECTORS * MAX_LANES];
    for (all, dots) in all.chunks_exact_mut(lanes).zip(dots) {
        store(all, zero.max(dots));
    }
    all[..real].iter().zip(weights).map(|(dot, weight)| dot * weight).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns numbers from -1 to 1 without order.
    fn numbers(n: usize, seed: usize) -> Vec<f32> {
        let bits = |i: usize| (i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        (0..n).map(|i| bits(i) as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    fn scores(query: &[f32], weights: &[f32], keys: &[f32], n: usize) -> Vec<f32> {
        let mut scores = vec![f32::NAN; n];
        HeadLanes::new(query, weights).score(keys, &mut scores);
        scores
    }

    /// A sum of n rounded products is off by at most n * 2^-24 of the sum of magnitudes, and so is
    /// the sum over heads.
    #[test]
    fn scores_match_f64() {
        for heads in [1, 3, 8, 16, 17, 31, 32, 33, 64] {
            for (head_dim, n) in [(1, 1), (3, 4), (32, 7), (128, 33), (130, 2)] {
                let query = numbers(heads * head_dim, 1);
                let (weights, keys) = (numbers(heads, 2), numbers(n * head_dim, 3));
                let got = scores(&query, &weights, &keys, n);
                for (key, got) in keys.chunks_exact(head_dim).zip(got) {
                    let (mut sum, mut size) = (0.0, 0.0);
                    for (query, &weight) in query.chunks_exact(head_dim).zip(&weights) {
                        let products =
                            query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k));
                        let dot: f64 = products.clone().sum();
                        sum += f64::from(weight) * dot.max(0.0);
                        size += f64::from(weight.abs()) * products.map(f64::abs).sum::<f64>();
                    }
                    let allowed = (head_dim + heads + 2) as f64 * 2f64.powi(-24) * size;
                    let off = (f64::from(got) - sum).abs();
                    assert!(off <= allowed, "{heads} heads of {head_dim}: {off} of {size}");
                }
            }
        }
    }

    /// Infinite products stay infinite, also beside lanes without a head; NaN stays NaN.
    #[test]
    fn scores_that_are_not_finite() {
        for heads in [1, 5, 16, 64] {
            let (query, weights) = (vec![1.0; 2 * heads], vec![0.5; heads]);
            let keys = [f32::INFINITY, 0.0, f32::NEG_INFINITY, 0.0, f32::NAN, 0.0, 1.0, 1.0];
            let got = scores(&query, &weights, &keys, 4);
            assert_eq!(got[..2], [f32::INFINITY, 0.0], "{heads} heads");
            assert!(got[2].is_nan(), "{heads} heads");
            assert_eq!(got[3], heads as f32, "{heads} heads");
        }
    }
}
