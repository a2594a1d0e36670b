//! The gated feed-forward block of the Llama family.

use burn::{
    module::Module,
    tensor::{Tensor, activation},
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
        self.down.forward(activation::silu(gate) * up)
    }
}
