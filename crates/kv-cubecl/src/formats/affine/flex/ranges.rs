//! The range that the codes of a group cover, from its elements.

use macerator::Simd;

use super::parameters::{F16_MAX, parameters};
use crate::formats::GroupRange;

/// Returns the least and the greatest number that codes of a group stand for. `min > max` if all
/// elements are NaN.
///
/// Sums are f64: a deviation that is small beside the mean would be lost in f32.
pub(super) fn range_of(
    elements: impl Iterator<Item = f32> + Clone,
    range: GroupRange,
    max_code: u32,
) -> (f32, f32) {
    let numbers = elements.map(|x| x.clamp(-F16_MAX, F16_MAX)).filter(|x| !x.is_nan());
    let (mut min, mut max) = (F16_MAX, -F16_MAX);
    for x in numbers.clone() {
        (min, max) = (min.min(x), max.max(x));
    }
    match range {
        GroupRange::MinMax => (min, max),
        GroupRange::Sigma(_) if min > max => (min, max),
        GroupRange::Sigma(hundredths) => {
            let (mean, deviation) = moments(numbers);
            clipped((min, max), mean, deviation, hundredths)
        }
        GroupRange::LeastError => least_error(numbers, (min, max), max_code),
    }
}

/// Clips a range to hundredths of a standard deviation around the mean.
fn clipped((min, max): (f32, f32), mean: f64, deviation: f64, hundredths: u16) -> (f32, f32) {
    let reach = f64::from(hundredths) / 100.0 * deviation;
    (min.max((mean - reach) as f32), max.min((mean + reach) as f32))
}

/// Returns the [range](range_of) of each column of `rows`, `[.., width]`, bit for bit. The numbers
/// must be finite and at most [`F16_MAX`] in magnitude.
#[macerator::with_simd]
pub(in crate::formats) fn column_ranges<S: Simd>(
    rows: &[f32],
    width: usize,
    range: GroupRange,
    max_code: u32,
) -> Vec<(f32, f32)> {
    if range == GroupRange::LeastError {
        let column = |nth: usize| rows[nth..].iter().copied().step_by(width);
        return (0..width).map(|nth| range_of(column(nth), range, max_code)).collect();
    }
    let (mut min, mut max) = (vec![F16_MAX; width], vec![-F16_MAX; width]);
    for row in rows.chunks_exact(width) {
        min.iter_mut().zip(row).for_each(|(min, &x)| *min = min.min(x));
        max.iter_mut().zip(row).for_each(|(max, &x)| *max = max.max(x));
    }
    let extremes = min.into_iter().zip(max);
    let GroupRange::Sigma(hundredths) = range else { return extremes.collect() };
    let n = (rows.len() / width) as f64;
    let (mut means, mut squares) = (vec![0f64; width], vec![0f64; width]);
    for row in rows.chunks_exact(width) {
        means.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
    }
    means.iter_mut().for_each(|sum| *sum /= n);
    for row in rows.chunks_exact(width) {
        for ((square, &mean), &x) in squares.iter_mut().zip(&means).zip(row) {
            *square += (f64::from(x) - mean).powi(2);
        }
    }
    let moments = means.into_iter().zip(squares);
    let ranges = extremes.zip(moments).map(|(extremes, (mean, squares))| {
        clipped(extremes, mean, sample_deviation(squares, n), hundredths)
    });
    ranges.collect()
}

/// Returns the sample standard deviation of `n` numbers with this sum of squared differences from
/// their mean.
fn sample_deviation(squares: f64, n: f64) -> f64 {
    (squares / (n - 1.0).max(1.0)).sqrt()
}

/// Returns the mean and the sample standard deviation; 0 for fewer than two numbers.
pub(super) fn moments(numbers: impl Iterator<Item = f32> + Clone) -> (f64, f64) {
    let n = numbers.clone().count() as f64;
    let mean = numbers.clone().map(f64::from).sum::<f64>() / n.max(1.0);
    let squares: f64 = numbers.map(|x| (f64::from(x) - mean).powi(2)).sum();
    (mean, sample_deviation(squares, n))
}

/// Returns a [part](GroupRange::PARTS) of a range around its middle.
pub(super) fn part_of((min, max): (f32, f32), part: f32) -> (f32, f32) {
    // The whole range is kept exactly.
    if part == 1.0 {
        return (min, max);
    }
    let (min, max) = (f64::from(min), f64::from(max));
    let (middle, half) = ((max + min) / 2.0, (max - min) / 2.0 * f64::from(part));
    ((middle - half) as f32, (middle + half) as f32)
}

fn least_error(
    numbers: impl Iterator<Item = f32> + Clone,
    whole: (f32, f32),
    max_code: u32,
) -> (f32, f32) {
    let max_code = max_code as f32;
    let error = |(min, max): (f32, f32)| {
        let (_, scale, min) = parameters(min, max, max_code);
        let error = |x: f32| {
            let code = ((x - min) / scale).clamp(0.0, max_code).round_ties_even();
            let restored = if scale == 0.0 { min } else { code * scale + min };
            (f64::from(restored) - f64::from(x)).powi(2)
        };
        numbers.clone().map(error).sum::<f64>()
    };
    let (mut best, mut least) = (whole, f64::INFINITY);
    for part in GroupRange::PARTS {
        let candidate = part_of(whole, part);
        let error = error(candidate);
        if error < least {
            (best, least) = (candidate, error);
        }
    }
    best
}
