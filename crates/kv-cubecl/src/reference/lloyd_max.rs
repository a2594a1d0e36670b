//! Lloyd-Max codes by their definition: the nearest level of a standard normal distribution.

use half::f16;

use crate::KvFormat;

/// Returns the levels of a format, from the lowest on; `None` for other formats.
pub(super) fn levels(format: KvFormat) -> Option<Vec<f64>> {
    let positive: &[f64] = match format {
        KvFormat::LloydMax2 => &[0.4528, 1.5104],
        KvFormat::LloydMax3 => &[0.2451, 0.756, 1.3439, 2.1519],
        KvFormat::LloydMax4 => &[0.1284, 0.388, 0.6568, 0.9423, 1.2562, 1.618, 2.069, 2.7326],
        _ => return None,
    };
    let negative = positive.iter().rev().map(|level| -level);
    Some(negative.chain(positive.iter().copied()).collect())
}

fn numbers(values: &[f32]) -> Vec<f64> {
    let limited = |&x: &f32| if x.is_nan() { 0.0 } else { f64::from(x.clamp(-65504.0, 65504.0)) };
    values.iter().map(limited).collect()
}

fn norm(numbers: &[f64]) -> f64 {
    numbers.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// Divides a token by its root mean square, takes the nearest level of each number, and scales the
/// levels to the norm of the token.
pub(super) fn quantize_token(values: &[f32], levels: &[f64]) -> (Vec<u8>, f16) {
    let numbers = numbers(values);
    let rms = norm(&numbers) / (numbers.len() as f64).sqrt();
    let nearest = |x: &f64| {
        let x = if rms == 0.0 { 0.0 } else { x / rms };
        let distance = |code: &usize| (levels[*code] - x).abs();
        let codes = 0..levels.len();
        codes.min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0)
    };
    let codes: Vec<usize> = numbers.iter().map(nearest).collect();
    let of_levels = norm(&codes.iter().map(|&code| levels[code]).collect::<Vec<_>>());
    let scale = f16::from_f64((norm(&numbers) / of_levels).min(65504.0));
    (codes.into_iter().map(|code| code as u8).collect(), scale)
}

/// Returns the gradient of a token: with constant codes, what it is restored to is proportional to
/// its root mean square, and rounding counts as the identity.
pub(super) fn token_backward(values: &[f32], grad: &[f64], levels: &[f64]) -> Vec<f64> {
    let numbers = numbers(values);
    let rms = norm(&numbers) / (numbers.len() as f64).sqrt();
    if rms == 0.0 {
        return grad.to_vec();
    }
    let (codes, scale) = quantize_token(values, levels);
    let restored = codes.iter().map(|&code| levels[usize::from(code)] * scale.to_f64());
    let errors = restored.zip(&numbers).map(|(restored, x)| restored - x);
    // The derivative of the root mean square by a number is the number over n times it.
    let of_rms: f64 = errors.zip(grad).map(|(error, grad)| error / rms * grad).sum();
    let n = numbers.len() as f64;
    grad.iter().zip(&numbers).map(|(grad, x)| grad + of_rms * x / (n * rms)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The density of the standard normal distribution, without its constant.
    fn density(x: f64) -> f64 {
        (-x * x / 2.0).exp()
    }

    /// Returns the mean of the distribution between two numbers, by Simpson's rule.
    fn mean(low: f64, high: f64) -> f64 {
        let n = 2000;
        let step = (high - low) / f64::from(n);
        let weights = (0..=n).map(|i| match i {
            0 => 1.0,
            i if i == n => 1.0,
            i if i % 2 == 1 => 4.0,
            _ => 2.0,
        });
        let at = |i: i32| low + f64::from(i) * step;
        let (mut mass, mut moment) = (0.0, 0.0);
        for (i, weight) in (0..=n).zip(weights) {
            mass += weight * density(at(i));
            moment += weight * density(at(i)) * at(i);
        }
        moment / mass
    }

    /// The levels are fixed points of Lloyd's algorithm: each is the mean of the numbers that are
    /// nearest to it.
    #[test]
    fn levels_by_lloyds_algorithm() {
        for format in [KvFormat::LloydMax2, KvFormat::LloydMax3, KvFormat::LloydMax4] {
            let known = levels(format).unwrap();
            let n = known.len();
            let mut levels: Vec<f64> =
                (0..n).map(|code| (code as f64 + 0.5) / n as f64 * 6.0 - 3.0).collect();
            for _ in 0..2000 {
                let edges: Vec<f64> =
                    levels.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
                for (code, level) in levels.iter_mut().enumerate() {
                    let low = if code == 0 { -9.0 } else { edges[code - 1] };
                    *level = mean(low, edges.get(code).copied().unwrap_or(9.0));
                }
            }
            for (level, known) in levels.iter().zip(&known) {
                // Published tables have four digits.
                assert!((level - known).abs() < 2e-4, "{format}: {level}, not {known}");
            }
        }
    }
}
