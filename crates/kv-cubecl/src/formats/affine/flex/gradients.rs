//! Gradients through the range of a group:
//! [`SteGradient::ScaleMin`](crate::SteGradient::ScaleMin).

use super::{
    parameters::F16_MAX,
    ranges::{moments, part_of},
};
use crate::formats::GroupRange;

/// A group that was quantized, for its gradient.
pub(in crate::formats) struct Quantized {
    /// The range that codes cover, before it was rounded.
    pub(in crate::formats) range: (f32, f32),
    /// The step between codes and the number of code 0 that restore the group.
    pub(in crate::formats) step: f32,
    pub(in crate::formats) min: f32,
    pub(in crate::formats) max_code: u32,
}

/// Replaces `grad`, the gradient of the restored elements of a group, by the gradient of the
/// elements.
///
/// A code follows its element and the ends of the range, as if it were not rounded. An element
/// outside of the range moves the end that it is restored to, and nothing else.
pub(in crate::formats) fn through_range(
    elements: &[f32],
    grad: &mut [f32],
    rule: GroupRange,
    group: &Quantized,
) {
    let Quantized { range: (low, high), step, min, max_code } = *group;
    if step <= 0.0 {
        return;
    }
    let n = max_code as f32;
    let (mut of_low, mut of_high) = (0.0f64, 0.0f64);
    for (&x, grad) in elements.iter().zip(grad.iter_mut()) {
        let x = x.clamp(-F16_MAX, F16_MAX);
        if x.is_nan() {
            continue;
        }
        let outside = rule != GroupRange::MinMax && (x < low || x > high);
        if outside {
            *(if x < low { &mut of_low } else { &mut of_high }) += f64::from(*grad);
            *grad = 0.0;
            continue;
        }
        let steps = (x - min) / step;
        let error = (steps.clamp(0.0, n).round_ties_even() - steps).clamp(-0.5, 0.5);
        let moved = f64::from(*grad) * f64::from(error) / f64::from(n);
        of_high += moved;
        of_low -= moved;
    }
    distribute(elements, grad, rule, (low, high), [of_low, of_high]);
}

/// Adds the gradient of the ends of a range to the elements that they follow from.
fn distribute(
    elements: &[f32],
    grad: &mut [f32],
    rule: GroupRange,
    range: (f32, f32),
    [of_low, of_high]: [f64; 2],
) {
    let limited = elements.iter().map(|x| x.clamp(-F16_MAX, F16_MAX));
    let numbers = limited.enumerate().filter(|(_, x)| !x.is_nan());
    let (mut lowest, mut highest) = ((F16_MAX, 0), (-F16_MAX, 0));
    for (i, x) in numbers.clone() {
        if x < lowest.0 {
            lowest = (x, i);
        }
        if x > highest.0 {
            highest = (x, i);
        }
    }
    let mut add = |i: usize, gradient: f64| grad[i] += gradient as f32;
    match rule {
        GroupRange::MinMax => {
            add(highest.1, of_high);
            add(lowest.1, of_low);
        }
        GroupRange::LeastError => {
            let whole = (lowest.0, highest.0);
            let part = GroupRange::PARTS.into_iter().find(|&part| part_of(whole, part) == range);
            let part = f64::from(part.unwrap_or(1.0));
            let (near, far) = ((1.0 + part) / 2.0, (1.0 - part) / 2.0);
            add(highest.1, near * of_high + far * of_low);
            add(lowest.1, near * of_low + far * of_high);
        }
        GroupRange::Sigma(hundredths) => {
            let (mean, deviation) = moments(numbers.clone().map(|(_, x)| x));
            let sigmas = f64::from(hundredths) / 100.0;
            let n = numbers.clone().count() as f64;
            let clipped = [
                f64::from(lowest.0) < mean - sigmas * deviation,
                f64::from(highest.0) > mean + sigmas * deviation,
            ];
            let ends = [(lowest.1, of_low, -sigmas), (highest.1, of_high, sigmas)];
            for ((extreme, gradient, sigmas), clipped) in ends.into_iter().zip(clipped) {
                if !clipped {
                    add(extreme, gradient);
                    continue;
                }
                for (i, x) in numbers.clone() {
                    let of_deviation = (f64::from(x) - mean) / ((n - 1.0) * deviation);
                    add(i, gradient * (1.0 / n + sigmas * of_deviation));
                }
            }
        }
    }
}
