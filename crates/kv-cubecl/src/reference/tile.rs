//! Variance-normalized tiles (KVarN, 2026, <https://arxiv.org/abs/2606.03458>), in f64.

use half::f16;

use super::quantizer::{F16_MAX, range_of, through_range};
use crate::{GroupRange, Side, Tile};

/// A quantized tile, `[tokens, head_dim]`.
#[derive(Clone, Debug)]
pub struct QuantizedTile {
    /// One code per number.
    pub codes: Vec<u32>,
    /// The step between codes, of each channel of keys or token of values.
    pub scale: Vec<f16>,
    /// The number that code 0 stands for, as the step.
    pub min: Vec<f16>,
    /// The factor of each token of keys or channel of values.
    pub factors: Vec<f16>,
}

/// The options of a tile.
#[derive(Clone, Copy, Debug)]
pub struct TileOptions {
    /// Keys or values.
    pub side: Side,
    /// Channels.
    pub head_dim: usize,
    /// Bits of a code.
    pub n_bits: u32,
    /// The range of codes.
    pub range: GroupRange,
    /// The size of the tile, and the number of iterations.
    pub tile: Tile,
}

/// A tile and its scales before anything is rounded.
struct Normalized {
    numbers: Vec<f64>,
    rms: f64,
    tokens: Vec<f64>,
    channels: Vec<f64>,
    /// The range of each group, and the elements of the group.
    groups: Vec<((f64, f64), Vec<usize>)>,
}

/// Returns the sample standard deviations of the rows of `x`, each of `n` numbers.
fn deviations(x: &[f64], n: usize) -> Vec<f64> {
    let deviation = |row: &[f64]| {
        let mean = row.iter().sum::<f64>() / n as f64;
        (row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1) as f64).sqrt()
    };
    x.chunks(n).map(|row| deviation(row).clamp(1e-3, 1e3)).collect()
}

fn transposed(x: &[f64], columns: usize) -> Vec<f64> {
    let rows = x.len() / columns;
    (0..x.len()).map(|i| x[i % rows * columns + i / rows]).collect()
}

fn divided(x: &[f64], [tokens, channels]: &[Vec<f64>; 2]) -> Vec<f64> {
    let n = channels.len();
    let scaled = x.iter().enumerate();
    scaled.map(|(i, x)| x / tokens[i / n].exp() / channels[i % n].exp()).collect()
}

fn imbalance(x: &[f64], head_dim: usize) -> f64 {
    let spread = |deviations: Vec<f64>| {
        let greatest = deviations.iter().copied().fold(0.0, f64::max);
        greatest / deviations.into_iter().fold(f64::INFINITY, f64::min)
    };
    let channels = transposed(x, head_dim);
    spread(deviations(&channels, x.len() / head_dim)) + spread(deviations(x, head_dim))
}

impl Normalized {
    fn new(rows: &[f32], options: &TileOptions) -> Self {
        let TileOptions { side, head_dim, n_bits, range, tile } = *options;
        let limit = f64::from(F16_MAX);
        // A NaN counts as 0.
        let limited = |&x: &f32| if x.is_nan() { 0.0 } else { f64::from(x).clamp(-limit, limit) };
        let x: Vec<f64> = rows.iter().map(limited).collect();
        let rms = (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt();
        let rms = if rms > 0.0 { rms } else { 1.0 };
        let x: Vec<f64> = x.iter().map(|x| x / rms).collect();

        let mut logs = [vec![0.0; x.len() / head_dim], vec![0.0; head_dim]];
        let (mut best, mut least) = (logs.clone(), imbalance(&x, head_dim));
        let update = |logs: &mut [f64], deviations: Vec<f64>| {
            for (log, deviation) in logs.iter_mut().zip(deviations) {
                *log = (*log + deviation.ln()).clamp(-0.3, 10.0);
            }
        };
        for _ in 0..tile.iterations {
            let of_tokens = deviations(&divided(&x, &logs), head_dim);
            update(&mut logs[0], of_tokens);
            let channels = transposed(&divided(&x, &logs), head_dim);
            update(&mut logs[1], deviations(&channels, x.len() / head_dim));
            let found = imbalance(&divided(&x, &logs), head_dim);
            if found <= least {
                (best, least) = (logs.clone(), found);
            }
        }
        let numbers = divided(&x, &best);
        let [tokens, channels] = best.map(|logs| logs.into_iter().map(f64::exp).collect());
        let elements = |nth: usize| -> Vec<usize> {
            match side {
                Side::Keys => (nth..x.len()).step_by(head_dim).collect(),
                Side::Values => (nth * head_dim..(nth + 1) * head_dim).collect(),
            }
        };
        let n_groups = if side == Side::Keys { head_dim } else { x.len() / head_dim };
        let group = |nth| {
            let elements = elements(nth);
            let group: Vec<f64> = elements.iter().map(|&i| numbers[i]).collect();
            (range_of(&group, n_bits, range), elements)
        };
        let groups = (0..n_groups).map(group).collect();
        Self { numbers, rms, tokens, channels, groups }
    }
}

/// Quantizes a tile of numbers after their Hadamard transform.
pub fn quantize_tile(rows: &[f32], options: &TileOptions) -> QuantizedTile {
    let tile = Normalized::new(rows, options);
    let n = f64::from((1u32 << options.n_bits) - 1);
    let half = |x: f64| f16::from_f64(x.clamp(-f64::from(F16_MAX), f64::from(F16_MAX)));
    let channels: Vec<f64> = tile.channels.iter().map(|channel| channel * tile.rms).collect();
    let (with_groups, factors) = match options.side {
        Side::Keys => (channels, tile.tokens),
        Side::Values => (tile.tokens, channels),
    };
    let mut out = QuantizedTile {
        codes: vec![0; rows.len()],
        scale: vec![],
        min: vec![],
        factors: factors.into_iter().map(half).collect(),
    };
    for (((low, high), elements), factor) in tile.groups.into_iter().zip(with_groups) {
        let step = (high - low) / n;
        for i in elements {
            let steps = ((tile.numbers[i] - low) / step).clamp(0.0, n);
            out.codes[i] = if step == 0.0 { 0 } else { steps.round_ties_even() as u32 };
        }
        out.scale.push(half(step * factor));
        out.min.push(half(low * factor));
    }
    out
}

/// `(code * scale + min) * factor` of every number.
pub fn dequantize_tile(tile: &QuantizedTile, options: &TileOptions) -> Vec<f32> {
    let number = |(i, &code): (usize, &u32)| {
        let (token, channel) = (i / options.head_dim, i % options.head_dim);
        let (group, factor) = match options.side {
            Side::Keys => (channel, token),
            Side::Values => (token, channel),
        };
        let (scale, min) = (tile.scale[group].to_f32(), tile.min[group].to_f32());
        (code as f32 * scale + min) * tile.factors[factor].to_f32()
    };
    tile.codes.iter().enumerate().map(number).collect()
}

/// [`SteGradient::ScaleMin`](crate::SteGradient::ScaleMin) of a tile, whose scales of tokens and
/// channels count as constants: the gradient of `rows` from the gradient of the restored tile.
pub fn tile_backward(rows: &[f32], grad: &[f64], options: &TileOptions) -> Vec<f64> {
    let tile = Normalized::new(rows, options);
    let head_dim = options.head_dim;
    let scale = |i: usize| tile.rms * tile.tokens[i / head_dim] * tile.channels[i % head_dim];
    let mut out = grad.to_vec();
    for (_, elements) in &tile.groups {
        let numbers: Vec<f64> = elements.iter().map(|&i| tile.numbers[i]).collect();
        let of_numbers: Vec<f64> = elements.iter().map(|&i| grad[i] * scale(i)).collect();
        let (low, high) = range_of(&numbers, options.n_bits, options.range);
        let step = (high - low) / f64::from((1u32 << options.n_bits) - 1);
        let through =
            through_range(&numbers, &of_numbers, options.n_bits, options.range, (step, low));
        elements.iter().zip(through).for_each(|(&i, through)| out[i] = through / scale(i));
    }
    out
}
