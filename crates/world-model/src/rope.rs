//! Rope over time and both axes of a frame.

use core::f64::consts::PI;

use burn::tensor::{Device, Tensor, TensorData};

use crate::Config;

/// The cosines and sines of the tokens of consecutive frames, `[1, 1, tokens, head_dim / 2]` each.
#[derive(Clone, Debug)]
pub(super) struct FrameRope {
    cos: Tensor<4>,
    sin: Tensor<4>,
}

impl FrameRope {
    /// Computes the rope of `frames` frames, starting with frame `first`.
    ///
    /// A quarter of a head's channel pairs encodes the frame, a quarter the row, a quarter the
    /// column, and a quarter nothing. Pair i of n in a quarter has frequency `PI * linspace(1, 128,
    /// n)[i]`. Positions go from -1 to 1 over the frames of training, and along the axes from -1 in
    /// steps of 2 over the size. Angles are computed in 64 bits, so late frames are as exact as
    /// early ones.
    pub(super) fn new(config: &Config, first: u64, frames: usize, device: &Device) -> Self {
        let (size, quarter) = (config.sample_size, config.head_dim() / 8);
        let last = (quarter - 1).max(1) as f64;
        let frequencies =
            (0..quarter).map(|i| PI * (1.0 + (MAX_FREQUENCY - 1.0) * i as f64 / last));
        let frequencies: Vec<f64> = frequencies.collect();
        let angles_at =
            |position: f64| frequencies.iter().map(move |frequency| position * frequency);
        let along = |i: usize| 2.0 * i as f64 / size as f64 - 1.0;
        let pairs = 4 * quarter;
        let mut angles = Vec::with_capacity(frames * size * size * pairs);
        for frame in 0..frames as u64 {
            let time = 2.0 * (first + frame) as f64 / (config.n_frames - 1) as f64 - 1.0;
            for (row, column) in
                (0..size).flat_map(|row| (0..size).map(move |column| (row, column)))
            {
                let positions = [time, along(row), along(column)];
                angles.extend(positions.into_iter().flat_map(angles_at));
                angles.extend(core::iter::repeat_n(0.0, quarter));
            }
        }
        let shape = [1, 1, frames * size * size, pairs];
        let table = |of: fn(f64) -> f64| {
            let numbers: Vec<f32> = angles.iter().map(|&angle| of(angle) as f32).collect();
            Tensor::from_data(TensorData::new(numbers, shape), device)
        };
        Self { cos: table(f64::cos), sin: table(f64::sin) }
    }

    /// Applies rope to pairs of neighboring channels. In the output, the first channels of all
    /// pairs precede the second ones, as in the authors' code.
    ///
    /// # Shapes
    /// - x: `[batch, heads, tokens, head_dim]`
    /// - output: the same
    pub(super) fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        let [batch, heads, tokens, head_dim] = x.dims();
        let pairs = x.reshape([batch, heads, tokens, head_dim / 2, 2]);
        let [a, b] = [0, 1].map(|i| pairs.clone().narrow(4, i, 1).squeeze_dim::<4>(4));
        let (cos, sin) = (self.cos.clone(), self.sin.clone());
        let first = a.clone() * cos.clone() - b.clone() * sin.clone();
        Tensor::cat(vec![first, b * cos + a * sin], 3)
    }
}

/// The highest frequency of an axis, in half turns per unit.
const MAX_FREQUENCY: f64 = 128.0;
