//! Losses and divergences of logits, computed on the host with sums in f64.

use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
use rayon::prelude::*;

/// Returns the negative log-likelihood of each row's target in nats; `logits` are
/// `[targets.len(), vocab]`.
pub(crate) fn negative_log_likelihood(logits: &[f32], targets: &[u32]) -> Vec<f32> {
    let vocab = logits.len() / targets.len();
    let rows = logits.par_chunks_exact(vocab).zip(targets);
    rows.map(|(row, &target)| (log_sum_exp(row) - f64::from(row[target as usize])) as f32).collect()
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Divergence {
    /// Kullback-Leibler divergence in nats of the row's distribution from the float one,
    /// `sum_i p_i (log p_i - log q_i)`.
    pub(crate) kl: f32,
    /// Set if both have the same most likely token; the first one wins a tie.
    pub(crate) same_top: bool,
}

/// Compares each row of `logits` with the same row of `float`; both are `[rows, vocab]`.
pub(crate) fn divergence(float: &[f32], logits: &[f32], vocab: usize) -> Vec<Divergence> {
    let rows = float.par_chunks_exact(vocab).zip(logits.par_chunks_exact(vocab));
    rows.map(|(float, logits)| {
        let (float_lse, lse) = (log_sum_exp(float), log_sum_exp(logits));
        let expected: f64 = float
            .iter()
            .zip(logits)
            .map(|(&p, &q)| f64::from((p - float_lse as f32).exp()) * f64::from(p - q))
            .sum();
        let kl = (expected - float_lse + lse) as f32;
        Divergence { kl, same_top: top(float) == top(logits) }
    })
    .collect()
}

/// Returns the index of the largest logit, the first of equals.
pub(crate) fn top(row: &[f32]) -> Option<usize> {
    let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter().position(|&logit| logit == best)
}

/// Returns NaN if any logit is NaN.
fn log_sum_exp(row: &[f32]) -> f64 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|&x| f64::from((x - max).exp())).sum();
    f64::from(max) + sum.ln()
}

/// Returns the mean of independent samples and its standard error.
pub(crate) fn mean_and_stderr(samples: &[f32]) -> (f64, f64) {
    let n = samples.len() as f64;
    let mean = samples.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let squares: f64 = samples.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum();
    let stderr = if samples.len() > 1 { (squares / (n - 1.0) / n).sqrt() } else { 0.0 };
    (mean, stderr)
}

/// Returns the mean and its standard error for samples whose neighbors may be correlated, such as
/// the tokens of a text. The error is computed from the means of about `sqrt(n)` blocks. For
/// independent samples it estimates the same as [`mean_and_stderr`].
pub(crate) fn mean_and_block_stderr(samples: &[f64]) -> (f64, f64) {
    let n = samples.len();
    let mean = samples.iter().sum::<f64>() / n as f64;
    let n_blocks = n.isqrt().max(2).min(n);
    if n_blocks < 2 {
        return (mean, 0.0);
    }
    let squares: f64 = (0..n_blocks)
        .map(|i| &samples[i * n / n_blocks..(i + 1) * n / n_blocks])
        .map(|block| block.iter().map(|x| x - mean).sum::<f64>().powi(2))
        .sum();
    let blocks = n_blocks as f64;
    (mean, (squares * blocks / (blocks - 1.0)).sqrt() / n as f64)
}

/// Returns the 95% confidence interval of the mean of all samples, given the sum and the number of
/// the samples of each sequence; `None` for fewer than ten sequences, for which it would be far too
/// narrow.
///
/// The sequences are drawn with replacement many times, and the interval holds the middle 95% of
/// the means of all draws (Efron, 1979). Samples of one sequence may depend on each other.
pub(crate) fn bootstrap_interval(sequences: &[(f64, usize)]) -> Option<[f64; 2]> {
    const DRAWS: usize = 2000;
    if sequences.len() < 10 {
        return None;
    }
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(0);
    let mut mean = || {
        let (mut sum, mut count) = (0.0, 0);
        for _ in sequences {
            let (of_sequence, n) = sequences[rng.random_range(0..sequences.len())];
            sum += of_sequence;
            count += n;
        }
        sum / count as f64
    };
    let mut means: Vec<f64> = (0..DRAWS).map(|_| mean()).collect();
    means.sort_by(f64::total_cmp);
    Some([means[DRAWS / 40], means[DRAWS - 1 - DRAWS / 40]])
}

/// Returns the smallest samples that at least these thousandths of the samples do not exceed.
pub(crate) fn quantiles<const N: usize>(samples: &[f32], per_mille: [usize; N]) -> [f64; N] {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f32::total_cmp);
    per_mille.map(|per_mille| {
        let rank = (per_mille * sorted.len()).div_ceil(1000);
        sorted.get(rank.saturating_sub(1)).copied().map_or(0.0, f64::from)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_of_known_samples() {
        let (mean, stderr) = mean_and_stderr(&[1.0, 2.0, 3.0, 4.0]);
        assert_eq!(mean, 2.5);
        // Sample variance 5/3, over 4 samples.
        assert!((stderr - (5.0f64 / 3.0 / 4.0).sqrt()).abs() < 1e-12);
        let samples: Vec<f32> = (1..=1000).map(|x| x as f32).collect();
        assert_eq!(quantiles(&samples, [500, 999, 1000]), [500.0, 999.0, 1000.0]);
        assert_eq!(quantiles(&[7.0], [999]), [7.0]);
    }

    #[test]
    fn bootstraps_of_known_sequences() {
        assert_eq!(bootstrap_interval(&[(2.0, 4); 9]), None);
        assert_eq!(bootstrap_interval(&[(2.0, 4); 10]), Some([0.5, 0.5]), "equal means");
        // Means of 100 draws of 0 or 1 are binomial: 0.5 with a standard deviation of 0.05.
        let even: Vec<(f64, usize)> = (0..100).map(|i| (f64::from(i % 2) * 7.0, 7)).collect();
        let [low, high] = bootstrap_interval(&even).unwrap();
        assert!((low - 0.402).abs() < 0.015 && (high - 0.598).abs() < 0.015, "{low} to {high}");
    }

    #[test]
    fn losses_match_probabilities_in_f64() {
        let (p, q) = ([0.1f64, 0.2, 0.7], [0.3f64, 0.3, 0.4]);
        // A constant added to all logits, even a large one, changes nothing.
        let logits = |p: [f64; 3]| p.map(|x| (x.ln() + 50.0) as f32);
        let nll = negative_log_likelihood(&[logits(p), logits(q)].concat(), &[2, 1]);
        // f32 logits near 50 are 4e-6 apart.
        assert!((f64::from(nll[0]) + p[2].ln()).abs() < 1e-5, "{nll:?}");
        assert!((f64::from(nll[1]) + q[1].ln()).abs() < 1e-5, "{nll:?}");
        let kl = divergence(&logits(p), &logits(q), 3);
        let expected: f64 = p.iter().zip(q).map(|(p, q)| p * (p / q).ln()).sum();
        assert!((f64::from(kl[0].kl) - expected).abs() < 1e-5, "{kl:?} against {expected}");
        assert!(kl[0].same_top, "the last is the most likely of both");
        let same = Divergence { kl: 0.0, same_top: true };
        assert_eq!(divergence(&logits(p), &logits(p), 3), [same]);
        assert!(!divergence(&[1.0, 2.0], &[2.0, 1.0], 2)[0].same_top);
        assert!(
            divergence(&[1.0, 2.0, 2.0], &[1.0, 3.0, 0.0], 3)[0].same_top,
            "of equals, the first"
        );
    }

    #[test]
    fn blocks_see_that_neighbors_are_alike() {
        // 100 samples in 10 blocks, whose means are known.
        let alike: Vec<f64> = (0..100).map(|i| f64::from(i / 10 % 2)).collect();
        let (mean, stderr) = mean_and_block_stderr(&alike);
        assert_eq!(mean, 0.5);
        // Ten block means of 0 and 1: variance 10 * 0.25 / 9, over ten blocks.
        assert!((stderr - (10.0f64 * 0.25 / 9.0 / 10.0).sqrt()).abs() < 1e-12, "{stderr}");
        let independent: Vec<f32> = alike.iter().map(|&x| x as f32).collect();
        assert!(stderr > 3.0 * mean_and_stderr(&independent).1);
        // Alternating samples cancel in every block.
        let alternating: Vec<f64> = (0..100).map(|i| f64::from(i % 2)).collect();
        assert!(mean_and_block_stderr(&alternating).1 < 1e-12);
        assert_eq!(mean_and_block_stderr(&[3.0]), (3.0, 0.0));
        assert!(mean_and_block_stderr(&[1.0, 2.0, 4.0]).1 > 0.0);
    }

    #[test]
    fn a_nan_is_not_hidden() {
        assert!(negative_log_likelihood(&[1.0, f32::NAN, 2.0], &[0])[0].is_nan());
    }
}
