//! The gated feed-forward block of the Llama family.

use burn::{
    module::Module,
    tensor::{DType, Tensor, activation},
};

use super::Linear;

/// `down(silu(gate(x)) * up(x))`, <https://arxiv.org/abs/2002.05202>, gate and up in one matrix.
#[derive(Module, Debug)]
pub struct SwiGlu {
    /// Gate rows, then up rows: `[2 * intermediate, hidden]`.
    pub gate_up: Linear,
    /// `[hidden, intermediate]`.
    pub down: Linear,
}

impl SwiGlu {
    /// Applies the block.
    ///
    /// # Shapes
    ///
    /// - x: `[batch, seq, hidden]`
    /// - output: `[batch, seq, hidden]`
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let gate_up = self.gate_up.forward(x); // [batch, seq, 2 * intermediate]
        let intermediate = gate_up.dims()[2] / 2;
        let gate = gate_up.clone().narrow(2, 0, intermediate);
        let up = gate_up.narrow(2, intermediate, intermediate);
        self.down.forward(in_f32(gate, activation::silu) * up)
    }
}

/// `f(x)` computed in f32, and rounded to the type of x.
pub fn in_f32(x: Tensor<3>, f: impl FnOnce(Tensor<3>) -> Tensor<3>) -> Tensor<3> {
    let dtype = x.dtype();
    f(x.cast(DType::F32)).cast(dtype)
}
