//! The scales of the tokens and channels of a tile.

use macerator::{Scalar, Simd};

use crate::{
    formats::normalized::{DEVIATIONS, SCALES},
    simd::{self, load, store},
};

/// A matrix by rows. Each row is padded with zeros to whole vectors.
pub(super) struct Columns {
    pub(super) numbers: Vec<f32>,
    /// Numbers of a row, padding included.
    pub(super) width: usize,
    /// Number of columns without padding.
    pub(super) len: usize,
}

impl Columns {
    /// Copies `rows`, `[.., len]`.
    pub(super) fn new(rows: &[f32], len: usize) -> Self {
        let mut columns = Self::zeros(rows.len() / len, len);
        let padded = columns.numbers.chunks_exact_mut(columns.width);
        for (to, from) in padded.zip(rows.chunks_exact(len)) {
            to[..len].copy_from_slice(from);
        }
        columns
    }

    /// Copies the transpose of `rows`, `[.., row_len]`.
    pub(super) fn transposed(rows: &[f32], row_len: usize) -> Self {
        let mut columns = Self::zeros(row_len, rows.len() / row_len);
        for (column, numbers) in rows.chunks_exact(row_len).enumerate() {
            let to = columns.numbers[column..].iter_mut().step_by(columns.width);
            to.zip(numbers).for_each(|(to, &x)| *to = x);
        }
        columns
    }

    fn zeros(rows: usize, len: usize) -> Self {
        let width = len.next_multiple_of(simd::lanes());
        Self { numbers: vec![0.0; rows * width], width, len }
    }

    /// Divides the numbers by the scales of their row and column.
    pub(super) fn divide(&mut self, rows: &[f32], columns: &[f32]) {
        let columns: Vec<f32> = columns.iter().map(|scale| 1.0 / scale).collect();
        for (row, scale) in self.numbers.chunks_exact_mut(self.width).zip(rows) {
            let inverse = 1.0 / scale;
            row.iter_mut().zip(&columns).for_each(|(x, column)| *x *= inverse * column);
        }
    }
}

/// The scales of columns, and their deviations, during the iterations.
struct Axis<'a> {
    columns: &'a Columns,
    scales: Vec<f32>,
    /// `1 / scale`.
    inverse: Vec<f32>,
    /// Standard deviations of the tile divided by the scales.
    deviations: Vec<f32>,
}

impl<'a> Axis<'a> {
    fn new(columns: &'a Columns) -> Self {
        let [scales, inverse, deviations] = [1.0, 1.0, 0.0].map(|x| vec![x; columns.width]);
        Self { columns, scales, inverse, deviations }
    }

    /// Multiplies the scales by the deviations, and updates the deviations to match the new scales.
    fn update(&mut self) {
        let scales = self.scales.iter_mut().zip(&mut self.inverse);
        for ((scale, inverse), deviation) in scales.zip(&mut self.deviations) {
            let before = *scale;
            *scale = (before * clamped(*deviation)).clamp(SCALES.0, SCALES.1);
            *inverse = 1.0 / *scale;
            *deviation *= before * *inverse;
        }
    }

    /// Computes the deviations, given `1 / scale` of each row.
    fn measure(&mut self, rows: &[f32]) {
        column_deviations(self.columns, rows, &mut self.deviations);
        self.deviations.iter_mut().zip(&self.inverse).for_each(|(x, inverse)| *x *= inverse);
    }

    /// Returns the quotient of the greatest and the least deviation.
    fn imbalance(&self) -> f32 {
        let (mut least, mut greatest) = (f32::INFINITY, 0.0f32);
        for &deviation in &self.deviations[..self.columns.len] {
            (least, greatest) = (least.min(deviation), greatest.max(deviation));
        }
        clamped(greatest) / clamped(least)
    }
}

fn clamped(deviation: f32) -> f32 {
    deviation.clamp(DEVIATIONS.0, DEVIATIONS.1)
}

/// Returns the scales of tokens and of channels after the iteration with the least imbalance. Later
/// iterations win ties.
pub(super) fn balance(tokens: &Columns, channels: &Columns, iterations: u32) -> [Vec<f32>; 2] {
    let (mut tokens, mut channels) = (Axis::new(tokens), Axis::new(channels));
    tokens.measure(&channels.inverse);
    channels.measure(&tokens.inverse);
    let mut least = tokens.imbalance() + channels.imbalance();
    let mut best = [tokens.scales.clone(), channels.scales.clone()];
    for _ in 0..iterations {
        tokens.update();
        channels.measure(&tokens.inverse);
        channels.update();
        tokens.measure(&channels.inverse);
        let imbalance = tokens.imbalance() + channels.imbalance();
        if imbalance <= least {
            least = imbalance;
            best[0].copy_from_slice(&tokens.scales);
            best[1].copy_from_slice(&channels.scales);
        }
    }
    best[0].truncate(tokens.columns.len);
    best[1].truncate(channels.columns.len);
    best
}

/// Computes the sample standard deviation of each column after multiplying every row by its factor.
#[macerator::with_simd]
fn column_deviations<S: Simd>(columns: &Columns, factors: &[f32], deviations: &mut [f32]) {
    let (lanes, mut first) = (f32::lanes::<S>(), 0);
    while first + 4 * lanes <= columns.width {
        vectors_of_deviations::<S, 4>(columns, factors, first, deviations);
        first += 4 * lanes;
    }
    while first < columns.width {
        vectors_of_deviations::<S, 1>(columns, factors, first, deviations);
        first += lanes;
    }
}

/// Computes the deviations of `N` vectors of columns from `first` on.
#[inline(always)]
fn vectors_of_deviations<S: Simd, const N: usize>(
    columns: &Columns,
    factors: &[f32],
    first: usize,
    deviations: &mut [f32],
) {
    let lanes = f32::lanes::<S>();
    let n = (columns.numbers.len() / columns.width) as f32;
    let mut means = [0.0f32.splat::<S>(); N];
    for (row, factor) in columns.numbers.chunks_exact(columns.width).zip(factors) {
        let factor = factor.splat();
        for (nth, sum) in means.iter_mut().enumerate() {
            *sum = load::<S, f32>(&row[first + nth * lanes..]).mul_add(factor, *sum);
        }
    }
    for mean in &mut means {
        *mean /= n.splat();
    }
    let mut squares = [0.0f32.splat::<S>(); N];
    for (row, factor) in columns.numbers.chunks_exact(columns.width).zip(factors) {
        let factor = factor.splat();
        for (nth, (sum, mean)) in squares.iter_mut().zip(means).enumerate() {
            let x = load::<S, f32>(&row[first + nth * lanes..]) * factor - mean;
            *sum = x.mul_add(x, *sum);
        }
    }
    for (nth, sum) in squares.into_iter().enumerate() {
        let variance = sum / (n - 1.0).max(1.0).splat();
        store(&mut deviations[first + nth * lanes..], variance.sqrt());
    }
}
