//! Initializes a [`GameRft`] with random weights.

use std::path::Path;

use burn::{
    module::Param,
    nn::Initializer,
    tensor::{Device, Tensor},
};

use crate::{
    Block, Config, ControlEmbedding, GameRft, Mlp,
    embed::{CONTROL_WIDTH, LEVEL_WIDTH, MOUSE_WIDTH},
};
use kv_models::{
    Result,
    nn::{Linear, init::linear},
};

impl GameRft {
    /// Creates a model with random weights, which depend on the device's seed.
    ///
    /// Weights are normal with variance `1 / d_input`, and biases are 0. The conditions of norms
    /// and gates start at 0, so the controls have no effect at first (Peebles and Xie, 2022,
    /// <https://arxiv.org/abs/2212.09748>). Unlike there, the biases of gates start at `1 / sqrt(2
    /// n_layers)`: layers contribute from the start, and the residual stream keeps its scale. The
    /// output starts at 0.
    ///
    /// # Errors
    /// Returns [`Error::Config`](kv_models::Error::Config) for the first field that breaks a rule.
    pub fn init(config: Config, device: &Device) -> Result<Self> {
        config.check(Path::new("config.json"))?;
        let Config { d_model, channels, n_buttons, n_layers, .. } = config;
        let mlp = |[input, hidden, output]: [usize; 3]| Mlp {
            up: linear([hidden, input], 1.0, true, device),
            down: linear([output, hidden], 1.0, true, device),
        };
        let input = linear([d_model, channels], 1.0, false, device);
        let level = mlp([LEVEL_WIDTH, 4 * d_model, d_model]);
        let controls = ControlEmbedding {
            angle: linear([MOUSE_WIDTH / 2, 2], 1.0, false, device),
            mouse: mlp([MOUSE_WIDTH, CONTROL_WIDTH, d_model]),
            buttons: mlp([n_buttons, CONTROL_WIDTH, d_model]),
        };
        let gate = 1.0 / (2.0 * n_layers as f64).sqrt();
        let layers = (0..n_layers).map(|_| Block {
            attention_norm: constant([2 * d_model, d_model], 0.0, device),
            qkv: linear([3 * d_model, d_model], 1.0, true, device),
            output: linear([d_model, d_model], 1.0, true, device),
            attention_gate: constant([d_model, d_model], gate, device),
            mlp_norm: constant([2 * d_model, d_model], 0.0, device),
            mlp: mlp([d_model, 4 * d_model, d_model]),
            mlp_gate: constant([d_model, d_model], gate, device),
        });
        let layers = layers.collect();
        let norm = constant([2 * d_model, d_model], 0.0, device);
        let output = constant([channels, d_model], 0.0, device);
        Ok(Self { input, level, controls, layers, norm, output, config })
    }
}

/// Creates a projection whose output is always `value`.
fn constant(shape: [usize; 2], value: f64, device: &Device) -> Linear {
    let bias = Initializer::Constant { value }.init([shape[0]], device);
    let weight: Param<Tensor<2>> = Initializer::Zeros.init(shape, device);
    Linear { weight: weight.into(), bias: Some(bias) }
}
