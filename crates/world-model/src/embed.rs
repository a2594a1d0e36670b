//! Embeds noise levels, mouse and buttons for the conditions of layers.

use core::f64::consts::TAU;

use burn::{
    module::Module,
    tensor::{DType, Tensor, TensorData, activation},
};

use crate::Controls;
use kv_models::nn::Linear;

/// The width of the sinusoidal embedding of a noise level.
pub(super) const LEVEL_WIDTH: usize = 512;
/// The width of the mouse embedding: half for its angle, half for its length.
pub(super) const MOUSE_WIDTH: usize = 512;
/// The hidden width of the embeddings of mouse and buttons.
pub(super) const CONTROL_WIDTH: usize = 4 * MOUSE_WIDTH;

/// A two-layer MLP, `down(silu(up(x)))`.
#[derive(Module, Debug)]
pub struct Mlp {
    /// The first projection.
    pub up: Linear,
    /// The second projection.
    pub down: Linear,
}

impl Mlp {
    /// Applies the block.
    ///
    /// # Shapes
    /// - x: `[batch, seq, d_input]`
    /// - output: `[batch, seq, d_output]`
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(activation::silu(self.up.forward(x)))
    }
}

/// The embeddings of the player's input.
#[derive(Module, Debug)]
pub struct ControlEmbedding {
    /// Embeds the cosine and sine of the mouse's direction, `[MOUSE_WIDTH / 2, 2]`.
    pub angle: Linear,
    /// Embeds direction and length.
    pub mouse: Mlp,
    /// Embeds the buttons, 1 if pressed and otherwise -1.
    pub buttons: Mlp,
}

impl ControlEmbedding {
    /// Returns the sum of both embeddings, `[batch, frames, d_model]`, for controls in f32 and
    /// weights of type `dtype`.
    pub fn forward(&self, controls: &Controls, dtype: DType) -> Tensor<3> {
        // Large movements are compressed along each axis: sign(x) ln(1 + |x|).
        let mouse = controls.mouse.clone();
        let mouse = mouse.clone().sign() * mouse.abs().log1p();
        let length = mouse.clone().square().sum_dim(2).sqrt();
        // A mouse at rest points along the first axis, as atan2 defines it.
        let rests = length.clone().equal_elem(0.0);
        let direction = mouse / length.clone().mask_fill(rests.clone(), 1.0);
        let [batch, frames, _] = direction.dims();
        let first = direction.clone().narrow(2, 0, 1).mask_fill(rests, 1.0);
        let direction = Tensor::cat(vec![first, direction.narrow(2, 1, 1)], 2);
        let length = waves(length.reshape([batch, frames]), MOUSE_WIDTH / 2).cast(dtype);
        let mouse = Tensor::cat(vec![self.angle.forward(direction.cast(dtype)), length], 2);
        let buttons = controls.buttons.clone() * 2.0 - 1.0;
        self.mouse.forward(mouse) + self.buttons.forward(buttons.cast(dtype))
    }
}

/// Returns `width / 2` sines of `1000 x`, then cosines, at frequencies from 1 down to 1 / 300:
/// `[batch, frames, width]`.
pub(super) fn waves(x: Tensor<2>, width: usize) -> Tensor<3> {
    const SCALE: f64 = 1000.0;
    const SLOWEST: f64 = 300.0;
    let n = width / 2;
    let frequency = |i: usize| (-SLOWEST.ln() * i as f64 / (n - 1) as f64).exp() as f32;
    let frequencies: Vec<f32> = (0..n).map(frequency).collect();
    let frequencies = TensorData::new(frequencies, [1, 1, n]);
    let frequencies = Tensor::<3>::from_data(frequencies, &x.device());
    let angles = reduced(x.unsqueeze_dim::<3>(2) * SCALE * frequencies);
    Tensor::cat(vec![angles.clone().sin(), angles.cos()], 2)
}

/// Reduces angles modulo a full turn, because sines of large angles are inexact on some devices.
/// The high part of a turn has few digits, so its multiples are exact.
fn reduced(angles: Tensor<3>) -> Tensor<3> {
    const HIGH: f64 = 6.28125;
    let turns = (angles.clone() / TAU).round();
    angles - turns.clone() * HIGH - turns * (TAU - HIGH)
}
