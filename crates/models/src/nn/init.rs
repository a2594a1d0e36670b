//! Random weights for training.

use burn::{
    module::Param,
    nn::Initializer,
    tensor::{Device, Tensor},
};

use super::{linear::Linear, matrix::Matrix};

/// Returns a projection with random weights and zero biases.
pub fn linear(shape: [usize; 2], gain: f64, bias: bool, device: &Device) -> Linear {
    Linear {
        weight: normal(shape, gain, device),
        bias: bias.then(|| Initializer::Zeros.init([shape[0]], device)),
    }
}

/// Returns a `[d_output, d_input]` matrix of normal values with standard deviation
/// `gain / sqrt(d_input)`.
pub fn normal(shape: [usize; 2], gain: f64, device: &Device) -> Matrix {
    let std = gain / (shape[1] as f64).sqrt();
    let param: Param<Tensor<2>> = Initializer::Normal { mean: 0.0, std }.init(shape, device);
    // Burn draws the values on first use. Using them here makes them depend on the seed alone and
    // not on the order in which weights are used later.
    param.val();
    param.into()
}
