//! The formula of the quantizer, for one group.

use half::f16;

use crate::GroupRange;

/// Largest finite f16; inputs beyond it, infinite ones too, saturate, so that scale and minimum
/// stay finite.
pub const F16_MAX: f32 = 65504.0;

/// A quantized group.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedGroup {
    /// One code per element, at most `2^n_bits - 1`.
    pub codes: Vec<u32>,
    /// Step between two codes.
    pub scale: f16,
    /// Value of code 0.
    pub min: f16,
}

/// Quantizes the elements that share one scale and minimum: [`quantize_group_in`] from the least to
/// the greatest.
pub fn quantize_group(values: &[f32], n_bits: u32) -> QuantizedGroup {
    quantize_group_in(values, n_bits, GroupRange::MinMax)
}

/// Quantizes the elements that share one scale and minimum. With `n = 2^n_bits - 1` and the range
/// `low` to `high`: `min = f16(low)`, `scale = f16((high - low) / n)`, `code =
/// round_half_even(clamp((x - min) / scale, 0, n))`, codes in f32; codes are 0 if the scale is. A
/// NaN does not count for the range and has code 0; if all are NaN, the range is 0.
pub fn quantize_group_in(values: &[f32], n_bits: u32, range: GroupRange) -> QuantizedGroup {
    let values: Vec<f32> = values.iter().map(|x| x.clamp(-F16_MAX, F16_MAX)).collect();
    let numbers = values.iter().copied().filter(|x| !x.is_nan());
    let numbers: Vec<f64> = numbers.map(f64::from).collect();
    let n = ((1u32 << n_bits) - 1) as f32;
    let (scale, min) = parameters(range_of(&numbers, n_bits, range), n_bits);
    let code = |x: &f32| {
        if scale == f16::ZERO || x.is_nan() {
            return 0;
        }
        let steps = (x - min.to_f32()) / scale.to_f32();
        steps.clamp(0.0, n).round_ties_even() as u32
    };
    QuantizedGroup { codes: values.iter().map(code).collect(), scale, min }
}

fn parameters((low, high): (f64, f64), n_bits: u32) -> (f16, f16) {
    // The quotient is one of f32.
    let n = ((1u32 << n_bits) - 1) as f32;
    (f16::from_f32((high as f32 - low as f32) / n), f16::from_f32(low as f32))
}

fn extremes(numbers: &[f64]) -> (f64, f64) {
    let lowest = numbers.iter().copied().reduce(f64::min).unwrap_or(0.0);
    (lowest, numbers.iter().copied().reduce(f64::max).unwrap_or(0.0))
}

/// Returns the mean and the sample standard deviation.
fn moments(numbers: &[f64]) -> (f64, f64) {
    let n = numbers.len() as f64;
    let mean = numbers.iter().sum::<f64>() / n;
    let squares: f64 = numbers.iter().map(|x| (x - mean).powi(2)).sum();
    (mean, (squares / (n - 1.0)).sqrt())
}

/// Returns the part of the whole range around its middle.
fn part_of((low, high): (f64, f64), part: f64) -> (f64, f64) {
    let (middle, half) = ((high + low) / 2.0, (high - low) / 2.0 * part);
    if part == 1.0 { (low, high) } else { (middle - half, middle + half) }
}

const PARTS: [f64; 8] = [1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65];

/// Returns the part of the whole range whose codes have the least squared error.
fn best_part(numbers: &[f64], n_bits: u32) -> f64 {
    let n = f64::from((1u32 << n_bits) - 1);
    let error = |part: f64| {
        let (scale, min) = parameters(part_of(extremes(numbers), part), n_bits);
        let (scale, min) = (scale.to_f64(), min.to_f64());
        let restored = |x: f64| match scale == 0.0 {
            true => min,
            false => ((x - min) / scale).clamp(0.0, n).round_ties_even() * scale + min,
        };
        numbers.iter().map(|&x| (restored(x) - x).powi(2)).sum::<f64>()
    };
    let mut best = (1.0, error(1.0));
    for part in PARTS {
        let error = error(part);
        if error < best.1 {
            best = (part, error);
        }
    }
    best.0
}

/// Returns the range that codes cover.
pub(super) fn range_of(numbers: &[f64], n_bits: u32, range: GroupRange) -> (f64, f64) {
    let (low, high) = extremes(numbers);
    match range {
        GroupRange::MinMax => (low, high),
        GroupRange::Sigma(_) if numbers.len() < 2 => (low, high),
        GroupRange::Sigma(hundredths) => {
            let (mean, deviation) = moments(numbers);
            let reach = f64::from(hundredths) / 100.0 * deviation;
            (low.max(mean - reach), high.min(mean + reach))
        }
        GroupRange::LeastError => part_of((low, high), best_part(numbers, n_bits)),
    }
}

/// [`SteGradient::ScaleMin`](crate::SteGradient::ScaleMin) of a group without NaN that was
/// quantized with this step and minimum: the derivative of what it restores to, with the rounding
/// of codes as the identity.
pub(super) fn through_range(
    numbers: &[f64],
    grad: &[f64],
    n_bits: u32,
    range: GroupRange,
    (step, min): (f64, f64),
) -> Vec<f64> {
    let mut out = grad.to_vec();
    if step == 0.0 || numbers.is_empty() {
        return out;
    }
    let n = f64::from((1u32 << n_bits) - 1);
    let (low, high) = range_of(numbers, n_bits, range);
    let [mut of_low, mut of_high] = [0.0; 2];
    for (i, &x) in numbers.iter().enumerate() {
        // A number beyond the range restores to its end, and moves with it only.
        if range != GroupRange::MinMax && (x < low || x > high) {
            *(if x < low { &mut of_low } else { &mut of_high }) += grad[i];
            out[i] = 0.0;
            continue;
        }
        let code = ((x - min) / step).clamp(0.0, n).round_ties_even();
        let error = (code - (x - min) / step).clamp(-0.5, 0.5);
        of_high += grad[i] * error / n;
        of_low -= grad[i] * error / n;
    }
    let (lowest, highest) = extremes(numbers);
    let first = |wanted: f64| numbers.iter().position(|&x| x == wanted).unwrap_or(0);
    match range {
        GroupRange::MinMax => {
            out[first(highest)] += of_high;
            out[first(lowest)] += of_low;
        }
        GroupRange::LeastError => {
            let part = best_part(numbers, n_bits);
            // high = (highest + lowest) / 2 + part * (highest - lowest) / 2, and low likewise.
            out[first(highest)] += of_high * (0.5 + part / 2.0) + of_low * (0.5 - part / 2.0);
            out[first(lowest)] += of_low * (0.5 + part / 2.0) + of_high * (0.5 - part / 2.0);
        }
        GroupRange::Sigma(hundredths) => {
            let (mean, deviation) = moments(numbers);
            let sigmas = f64::from(hundredths) / 100.0;
            let count = numbers.len() as f64;
            for (extreme, end, of_end, sign) in
                [(lowest, low, of_low, -1.0), (highest, high, of_high, 1.0)]
            {
                if extreme == end {
                    out[first(extreme)] += of_end;
                    continue;
                }
                for (out, x) in out.iter_mut().zip(numbers) {
                    let of_deviation = (x - mean) / ((count - 1.0) * deviation);
                    *out += of_end * (1.0 / count + sign * sigmas * of_deviation);
                }
            }
        }
    }
    out
}

/// `code * scale + min` of every element.
pub fn dequantize_group(group: &QuantizedGroup) -> Vec<f32> {
    let (scale, min) = (group.scale.to_f32(), group.min.to_f32());
    group.codes.iter().map(|&code| code as f32 * scale + min).collect()
}

/// [`SteGradient::ScaleMin`](crate::SteGradient::ScaleMin) for one group: the gradient of `values`
/// from `grad`, the gradient of the restored numbers. A NaN has no rounding error.
pub fn fake_quantize_group_backward(
    values: &[f32],
    grad: &[f64],
    n_bits: u32,
    range: GroupRange,
) -> Vec<f64> {
    let mut out = grad.to_vec();
    let group = quantize_group_in(values, n_bits, range);
    let numbers: Vec<usize> = (0..values.len()).filter(|&i| !values[i].is_nan()).collect();
    let x: Vec<f64> =
        numbers.iter().map(|&i| f64::from(values[i].clamp(-F16_MAX, F16_MAX))).collect();
    let grads: Vec<f64> = numbers.iter().map(|&i| grad[i]).collect();
    let parameters = (group.scale.to_f64(), group.min.to_f64());
    let through = through_range(&x, &grads, n_bits, range, parameters);
    numbers.into_iter().zip(through).for_each(|(i, through)| out[i] = through);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_bits_by_hand() {
        // min -1, max 2, scale 1: ties at -0.5 (0.5 steps) and 0.5 (1.5 steps) go to even.
        let group = quantize_group(&[-1.0, 2.0, -0.5, 0.5, 0.6, 1.4], 2);
        assert_eq!(group.codes, [0, 3, 0, 2, 2, 2]);
        assert_eq!((group.scale.to_f32(), group.min.to_f32()), (1.0, -1.0));
        assert_eq!(dequantize_group(&group), [-1.0, 2.0, -1.0, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn constant_and_huge() {
        let constant = quantize_group(&[0.1; 8], 4);
        assert_eq!(constant.codes, [0; 8]);
        assert_eq!(dequantize_group(&constant), [f16::from_f32(0.1).to_f32(); 8]);

        let huge = quantize_group(&[-1e6, 1e6], 2);
        assert_eq!(huge.codes, [0, 3]);
        assert_eq!(huge.min.to_f32(), -F16_MAX);
        assert!(huge.scale.is_finite());
    }

    #[test]
    fn not_finite() {
        let infinite = quantize_group(&[f32::NEG_INFINITY, 0.0, f32::INFINITY], 2);
        assert_eq!(infinite, quantize_group(&[-F16_MAX, 0.0, F16_MAX], 2));
        let nan = quantize_group(&[f32::NAN, 1.0, 4.0, f32::NAN, 2.0], 2);
        assert_eq!(dequantize_group(&nan), [1.0, 1.0, 4.0, 1.0, 2.0]);
        assert_eq!(dequantize_group(&quantize_group(&[f32::NAN; 3], 2)), [0.0; 3]);
    }

    #[test]
    fn scale_gradients_by_hand() {
        // min -1, max 2, scale 1, codes 0 3 0 2 2 2.
        let values = [-1.0, 2.0, -0.5, 0.5, 0.6, 1.4];
        let grad = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0];
        assert_eq!(dequantize_group(&quantize_group(&values, 2))[2..], [-1.0, 1.0, 1.0, 1.0]);
        // Errors 0, 0, -0.5, 0.5, 0.4, -0.4: -2 + 4 + 6.4 - 12.8 = -4.4, a third of it moves.
        let got = fake_quantize_group_backward(&values, &grad, 2, GroupRange::MinMax);
        let expected = [1.0 + 4.4 / 3.0, 2.0 - 4.4 / 3.0, 4.0, 8.0, 16.0, 32.0];
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() < 1e-5, "{got}, not {expected}");
        }
        // A constant group, and the first of equal extremes.
        assert_eq!(fake_quantize_group_backward(&[0.1; 6], &grad, 4, GroupRange::MinMax), grad);
        let ties = fake_quantize_group_backward(
            &[0.0, 3.0, 0.0, 3.0, 1.25, 1.0],
            &grad,
            2,
            GroupRange::MinMax,
        );
        assert_eq!(ties, [1.0 + 4.0 / 3.0, 2.0 - 4.0 / 3.0, 4.0, 8.0, 16.0, 32.0]);
    }
}
