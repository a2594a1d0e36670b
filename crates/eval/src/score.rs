//! Losses and divergences from logits, on the device.

use burn::tensor::{Int, Tensor};

/// `log sum exp` of each row of `[n, vocab]`, `[n, 1]`.
pub(crate) fn log_sum_exp(logits: Tensor<2>) -> Tensor<2> {
    let max = logits.clone().max_dim(1);
    (logits - max.clone()).exp().sum_dim(1).log() + max
}

/// Negative log-likelihood in nats of each row's target, `[n]`.
pub(crate) fn negative_log_likelihood(
    logits: Tensor<2>,
    lse: Tensor<2>,
    targets: Tensor<1, Int>,
) -> Tensor<1> {
    let chosen = logits.gather(1, targets.unsqueeze_dim(1)); // [n, 1]
    (lse - chosen).squeeze_dim(1)
}

/// Kullback-Leibler divergence in nats of each row's distribution from the float one:
/// `sum_i p_i (log p_i - log q_i)`, `[n]`.
pub(crate) fn kl_divergence(
    float: Tensor<2>,
    float_lse: Tensor<2>,
    logits: Tensor<2>,
    lse: Tensor<2>,
) -> Tensor<1> {
    let p = (float.clone() - float_lse.clone()).exp();
    let expected = (p * (float - logits)).sum_dim(1);
    (expected - float_lse + lse).squeeze_dim(1)
}

/// Mean, and the standard error of the mean, of independent samples.
pub(crate) fn mean_and_stderr(samples: &[f32]) -> (f64, f64) {
    let n = samples.len() as f64;
    let mean = samples.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let squares: f64 = samples.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum();
    let stderr = if samples.len() > 1 { (squares / (n - 1.0) / n).sqrt() } else { 0.0 };
    (mean, stderr)
}

/// The smallest sample that at least `per_mille` of 1000 do not exceed.
pub(crate) fn quantile(samples: &[f32], per_mille: usize) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f32::total_cmp);
    let rank = (per_mille * sorted.len()).div_ceil(1000);
    sorted.get(rank.saturating_sub(1)).copied().map_or(0.0, f64::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, TensorData};

    #[test]
    fn statistics_of_known_samples() {
        let (mean, stderr) = mean_and_stderr(&[1.0, 2.0, 3.0, 4.0]);
        assert_eq!(mean, 2.5);
        // Sample variance 5/3, over 4 samples.
        assert!((stderr - (5.0f64 / 3.0 / 4.0).sqrt()).abs() < 1e-12);
        let samples: Vec<f32> = (1..=1000).map(|x| x as f32).collect();
        assert_eq!(quantile(&samples, 999), 999.0);
        assert_eq!(quantile(&samples, 1000), 1000.0);
        assert_eq!(quantile(&[7.0], 999), 7.0);
    }

    #[test]
    fn losses_match_probabilities_in_f64() {
        let device = Device::default();
        let (p, q) = ([0.1f64, 0.2, 0.7], [0.3f64, 0.3, 0.4]);
        // Logits are known up to a constant, also a large one.
        let logits = |p: [f64; 3]| p.map(|x| (x.ln() + 50.0) as f32);
        let tensor =
            |p| Tensor::<2>::from_data(TensorData::new(logits(p).to_vec(), [1, 3]), &device);
        let (a, b) = (tensor(p), tensor(q));
        let (a_lse, b_lse) = (log_sum_exp(a.clone()), log_sum_exp(b.clone()));
        let target = Tensor::<1, Int>::from_ints([1], &device);
        let nll = negative_log_likelihood(b.clone(), b_lse.clone(), target).into_scalar::<f32>();
        // f32 logits near 50 are 4e-6 apart.
        assert!((f64::from(nll) + q[1].ln()).abs() < 1e-5, "{nll}");
        let kl = kl_divergence(a, a_lse, b, b_lse).into_scalar::<f32>();
        let expected: f64 = p.iter().zip(q).map(|(p, q)| p * (p / q).ln()).sum();
        assert!((f64::from(kl) - expected).abs() < 1e-5, "{kl} against {expected}");
    }
}
