//! The range that the codes of a group cover, and the gradient through it.

use cubecl::prelude::*;
use kv_device::half::round_half_even;

use crate::formats::{
    GroupRange, QuantSpec,
    cube::{encode, greater, is_nan, lesser, offset, parameter, restore, saturate, scale},
};

/// Returns the mean and the sample standard deviation of the numbers of a group, without NaN.
#[cube]
fn moments(
    data: &[f32],
    first: usize,
    stride: usize,
    #[comptime] spec: QuantSpec,
) -> (f32, f32, f32) {
    let mut n = f32::new(0.0);
    let mut sum = f32::new(0.0);
    for i in 0..comptime!(spec.group_size) {
        let x = saturate(data[first + i * stride]);
        if !is_nan(x) {
            n += f32::new(1.0);
            sum += x;
        }
    }
    let mean = sum / clamp_min(n, f32::new(1.0));
    let mut squares = f32::new(0.0);
    for i in 0..comptime!(spec.group_size) {
        let x = saturate(data[first + i * stride]);
        if !is_nan(x) {
            squares += (x - mean) * (x - mean);
        }
    }
    let deviation = (squares / clamp_min(n - f32::new(1.0), f32::new(1.0))).sqrt();
    (mean, deviation, n)
}

/// Returns the least and the greatest number of a group, the former greater if all are NaN.
#[cube]
fn extremes(data: &[f32], first: usize, stride: usize, #[comptime] spec: QuantSpec) -> (f32, f32) {
    let mut min = f32::new(65504.0);
    let mut max = f32::new(-65504.0);
    for i in 0..comptime!(spec.group_size) {
        let x = saturate(data[first + i * stride]);
        min = lesser(min, x);
        max = greater(max, x);
    }
    (min, max)
}

/// Returns a part of a range around its middle.
#[cube]
fn part_of(min: f32, max: f32, #[comptime] part: f32) -> (f32, f32) {
    if comptime!(part == 1.0) {
        (min, max)
    } else {
        let middle = (max + min) / f32::new(2.0);
        let half = (max - min) / f32::new(2.0) * f32::new(part);
        (middle - half, middle + half)
    }
}

/// Returns the squared error of a group that is restored from codes of a range.
#[cube]
fn squared_error(
    data: &[f32],
    first: usize,
    stride: usize,
    min: f32,
    max: f32,
    #[comptime] spec: QuantSpec,
) -> f32 {
    let parameter = parameter(min, max, spec);
    let (scale, min) = (scale(parameter, spec), offset(parameter, spec));
    let mut sum = f32::new(0.0);
    for i in 0..comptime!(spec.group_size) {
        let x = saturate(data[first + i * stride]);
        if !is_nan(x) {
            let restored = restore(encode(x, scale, min, spec), scale, min, spec);
            sum += (restored - x) * (restored - x);
        }
    }
    sum
}

/// Returns the least and the greatest number that the codes of a group stand for.
#[cube]
pub(super) fn group_range(
    data: &[f32],
    first: usize,
    stride: usize,
    #[comptime] spec: QuantSpec,
) -> (f32, f32) {
    let whole = extremes(data, first, stride, spec);
    let mut min = whole.0;
    let mut max = whole.1;
    let range = comptime!(spec.range);
    #[comptime]
    match range {
        GroupRange::MinMax => {}
        GroupRange::Sigma(hundredths) => {
            let moments = moments(data, first, stride, spec);
            let reach = moments.1 * comptime!(hundredths as f32 / 100.0);
            min = clamp_min(min, moments.0 - reach);
            max = clamp_max(max, moments.0 + reach);
        }
        GroupRange::LeastError => {
            let mut least = squared_error(data, first, stride, min, max, spec);
            #[unroll]
            for nth in 1..comptime!(GroupRange::PARTS.len()) {
                let part = part_of(whole.0, whole.1, comptime!(GroupRange::PARTS[nth]));
                let error = squared_error(data, first, stride, part.0, part.1, spec);
                if error < least {
                    least = error;
                    min = part.0;
                    max = part.1;
                }
            }
        }
    }
    (min, max)
}

/// Replaces the gradient of a restored group by the gradient of its numbers, as
/// [`SteGradient::ScaleMin`](crate::SteGradient::ScaleMin). Numbers and gradients are `stride`
/// apart, `first` and `at` are the first of them.
#[cube]
#[allow(clippy::too_many_arguments, reason = "the numbers of one group")]
pub(super) fn through_range(
    numbers: &[f32],
    first: usize,
    grad: &mut [f32],
    at: usize,
    stride: usize,
    low: f32,
    high: f32,
    step: f32,
    min: f32,
    #[comptime] spec: QuantSpec,
) {
    let max_code = comptime!(spec.max_code() as f32);
    if step > 0.0f32 {
        let mut of_low = f32::new(0.0);
        let mut of_high = f32::new(0.0);
        for i in 0..comptime!(spec.group_size) {
            let x = saturate(numbers[first + i * stride]);
            let gradient = grad[at + i * stride];
            if !is_nan(x) {
                if comptime!(spec.range != GroupRange::MinMax) && x < low {
                    of_low += gradient;
                    grad[at + i * stride] = f32::new(0.0);
                } else if comptime!(spec.range != GroupRange::MinMax) && x > high {
                    of_high += gradient;
                    grad[at + i * stride] = f32::new(0.0);
                } else {
                    let steps = (x - min) / step;
                    let code = round_half_even(clamp(steps, f32::new(0.0), max_code));
                    let error = clamp(code - steps, f32::new(-0.5), f32::new(0.5));
                    let moved = gradient * error / max_code;
                    of_high += moved;
                    of_low -= moved;
                }
            }
        }
        distribute(numbers, first, grad, at, stride, low, high, of_low, of_high, spec);
    }
}

/// Adds the gradient of the ends of a range to the numbers that they follow from.
#[cube]
#[allow(clippy::too_many_arguments, reason = "the numbers of one group")]
fn distribute(
    numbers: &[f32],
    first: usize,
    grad: &mut [f32],
    at: usize,
    stride: usize,
    low: f32,
    high: f32,
    of_low: f32,
    of_high: f32,
    #[comptime] spec: QuantSpec,
) {
    let mut min = f32::new(65504.0);
    let mut max = f32::new(-65504.0);
    let mut lowest = at;
    let mut highest = at;
    for i in 0..comptime!(spec.group_size) {
        let x = saturate(numbers[first + i * stride]);
        if x < min {
            min = x;
            lowest = at + i * stride;
        }
        if x > max {
            max = x;
            highest = at + i * stride;
        }
    }
    let range = comptime!(spec.range);
    #[comptime]
    match range {
        GroupRange::MinMax => {
            grad[highest] += of_high;
            grad[lowest] += of_low;
        }
        GroupRange::LeastError => {
            // The range is a part of the whole one around its middle.
            let part = (high - low) / (max - min);
            let near = (f32::new(1.0) + part) / f32::new(2.0);
            let far = (f32::new(1.0) - part) / f32::new(2.0);
            grad[highest] += near * of_high + far * of_low;
            grad[lowest] += near * of_low + far * of_high;
        }
        GroupRange::Sigma(hundredths) => {
            let moments = moments(numbers, first, stride, spec);
            let sigmas = f32::new(comptime!(hundredths as f32 / 100.0));
            let n = moments.2;
            if high < max {
                let each = sigmas / ((n - f32::new(1.0)) * moments.1);
                for i in 0..comptime!(spec.group_size) {
                    let x = saturate(numbers[first + i * stride]);
                    if !is_nan(x) {
                        let moved = f32::new(1.0) / n + each * (x - moments.0);
                        grad[at + i * stride] += of_high * moved;
                    }
                }
            } else {
                grad[highest] += of_high;
            }
            if low > min {
                let each = sigmas / ((n - f32::new(1.0)) * moments.1);
                for i in 0..comptime!(spec.group_size) {
                    let x = saturate(numbers[first + i * stride]);
                    if !is_nan(x) {
                        let moved = f32::new(1.0) / n - each * (x - moments.0);
                        grad[at + i * stride] += of_low * moved;
                    }
                }
            } else {
                grad[lowest] += of_low;
            }
        }
    }
}
