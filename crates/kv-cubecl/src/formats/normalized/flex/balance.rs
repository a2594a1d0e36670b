//! The scales of the tokens and channels of a tile.

use macerator::Simd;

use crate::formats::normalized::{DEVIATIONS, SCALES};

/// The scales of a tile, by which its numbers are divided.
#[derive(Clone, Debug)]
pub(super) struct Scales {
    /// The root mean square of the tile; 1 if all numbers are 0.
    pub(super) rms: f32,
    pub(super) tokens: Vec<f32>,
    pub(super) channels: Vec<f32>,
}

/// Scales and deviations during the iterations.
struct Axis {
    scales: Vec<f32>,
    /// `1 / scale`.
    inverse: Vec<f32>,
    /// Standard deviations of the tile divided by the scales.
    deviations: Vec<f32>,
}

impl Axis {
    fn new(n: usize) -> Self {
        Self { scales: vec![1.0; n], inverse: vec![1.0; n], deviations: vec![0.0; n] }
    }

    /// Multiplies the scales by the deviations. These become the deviations of the tile with the
    /// new scales.
    fn update(&mut self) {
        let scales = self.scales.iter_mut().zip(&mut self.inverse);
        for ((scale, inverse), deviation) in scales.zip(&mut self.deviations) {
            let before = *scale;
            *scale = (before * clamped(*deviation)).clamp(SCALES.0, SCALES.1);
            *inverse = 1.0 / *scale;
            *deviation *= before * *inverse;
        }
    }

    /// Returns the quotient of the greatest and the least deviation.
    fn imbalance(&self) -> f32 {
        let (mut least, mut greatest) = (f32::INFINITY, 0.0f32);
        for deviation in &self.deviations {
            let deviation = clamped(*deviation);
            (least, greatest) = (least.min(deviation), greatest.max(deviation));
        }
        greatest / least
    }
}

fn clamped(deviation: f32) -> f32 {
    deviation.clamp(DEVIATIONS.0, DEVIATIONS.1)
}

/// Returns the scales of the iteration with the least imbalance. Later iterations win ties.
///
/// `tile`, `[tokens, head_dim]`, is divided by its root mean square.
pub(super) fn balance(tile: &mut [f32], head_dim: usize, iterations: u32) -> Scales {
    let squares: f64 = tile.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    let rms = (squares / tile.len() as f64).sqrt() as f32;
    let rms = if rms > 0.0 { rms } else { 1.0 };
    tile.iter_mut().for_each(|x| *x /= rms);

    let mut tokens = Axis::new(tile.len() / head_dim);
    let mut channels = Axis::new(head_dim);
    let mut sums = vec![0.0; 2 * head_dim];
    measure_tokens(tile, &mut tokens, &channels);
    measure_channels(tile, &tokens, &mut channels, &mut sums);
    let mut least = tokens.imbalance() + channels.imbalance();
    let mut best = [tokens.scales.clone(), channels.scales.clone()];
    for _ in 0..iterations {
        tokens.update();
        measure_channels(tile, &tokens, &mut channels, &mut sums);
        channels.update();
        measure_tokens(tile, &mut tokens, &channels);
        let imbalance = tokens.imbalance() + channels.imbalance();
        if imbalance <= least {
            least = imbalance;
            best[0].copy_from_slice(&tokens.scales);
            best[1].copy_from_slice(&channels.scales);
        }
    }
    let [tokens, channels] = best;
    Scales { rms, tokens, channels }
}

/// Computes the sample standard deviations of tokens over channels.
#[macerator::with_simd]
fn measure_tokens<S: Simd>(tile: &[f32], tokens: &mut Axis, channels: &Axis) {
    let head_dim = channels.inverse.len();
    let n = head_dim as f32;
    let rows = tile.chunks_exact(head_dim).zip(&tokens.inverse);
    for ((row, &inverse), deviation) in rows.zip(&mut tokens.deviations) {
        // Sixteen sums side by side, which the compiler keeps in vectors.
        let mut sums = [0.0f32; 16];
        let parts = row.chunks(16).zip(channels.inverse.chunks(16));
        for (row, scales) in parts.clone() {
            for ((sum, &x), &scale) in sums.iter_mut().zip(row).zip(scales) {
                *sum += x * scale;
            }
        }
        let mean = sums.iter().sum::<f32>() / n;
        let mut squares = [0.0f32; 16];
        for (row, scales) in parts {
            for ((sum, &x), &scale) in squares.iter_mut().zip(row).zip(scales) {
                let x = x * scale - mean;
                *sum += x * x;
            }
        }
        let variance = squares.iter().sum::<f32>() / (n - 1.0).max(1.0);
        *deviation = variance.sqrt() * inverse;
    }
}

/// Computes the sample standard deviations of channels over tokens. `sums` is scratch memory.
#[macerator::with_simd]
fn measure_channels<S: Simd>(tile: &[f32], tokens: &Axis, channels: &mut Axis, sums: &mut [f32]) {
    let head_dim = channels.inverse.len();
    let n = tokens.inverse.len() as f32;
    let (means, squares) = sums.split_at_mut(head_dim);
    means.fill(0.0);
    squares.fill(0.0);
    for (row, &scale) in tile.chunks_exact(head_dim).zip(&tokens.inverse) {
        for (sum, &x) in means.iter_mut().zip(row) {
            *sum += x * scale;
        }
    }
    means.iter_mut().for_each(|sum| *sum /= n);
    for (row, &scale) in tile.chunks_exact(head_dim).zip(&tokens.inverse) {
        for ((sum, &x), &mean) in squares.iter_mut().zip(row).zip(&*means) {
            let x = x * scale - mean;
            *sum += x * x;
        }
    }
    let scales = squares.iter().zip(&channels.inverse);
    for ((&square, &inverse), deviation) in scales.zip(&mut channels.deviations) {
        *deviation = (square / (n - 1.0).max(1.0)).sqrt() * inverse;
    }
}
