//! Random weights for training.

use std::sync::{Mutex, PoisonError};

use burn::{
    module::Param,
    nn::Initializer,
    tensor::{Device, Tensor},
};

use super::{linear::Linear, matrix::Matrix};

/// Seeds the random generator of `device` and runs `draw`, which draws from it. Calls in several
/// threads wait for each other, so `draw` must not call this function.
///
/// A backend has one generator in each process. Threads that seed it or draw from it at the same
/// time, other than by this function, change what is drawn.
pub fn seeded<T>(device: &Device, seed: u64, draw: impl FnOnce() -> T) -> T {
    static DRAWING: Mutex<()> = Mutex::new(());
    let _drawing = DRAWING.lock().unwrap_or_else(PoisonError::into_inner);
    device.seed(seed);
    let drawn = draw();
    // With Fusion, drawing is an operation in a queue. A failure shows when the numbers are read.
    let _ = device.sync();
    drawn
}

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
