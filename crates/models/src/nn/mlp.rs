//! The gated feed-forward block of the Llama family and its kin.

use burn::{
    module::Module,
    tensor::{DType, Tensor},
};

use tracing::trace_span;

use super::{linear::Linear, norm::RmsNorm};
use crate::spans::OPERATION;

/// The nonlinearity of a [`GatedMlp`].
pub use kv_weights::Gate as Gating;

/// `down(f(gate(x)) * up(x))`, <https://arxiv.org/abs/2002.05202>, gate and up in one matrix.
#[derive(Module, Debug)]
pub struct GatedMlp {
    /// Gate rows, then up rows: `[2 * intermediate, hidden]`.
    pub gate_up: Linear,
    /// `[hidden, intermediate]`.
    pub down: Linear,
    /// What the gate goes through.
    #[module(skip)]
    pub gating: Gating,
}

impl GatedMlp {
    /// Applies the block.
    ///
    /// # Shapes
    ///
    /// - x: `[batch, seq, hidden]`
    /// - output: `[batch, seq, hidden]`
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(self.gated(x))
    }

    /// `x` with the block of what `norm` makes of it added: two launches where weights are packed on a GPU and tokens
    /// few.
    ///
    /// # Shapes
    ///
    /// - x: `[batch, seq, hidden]`
    /// - output: `[batch, seq, hidden]`
    pub fn forward_added(&self, x: Tensor<3>, norm: &RmsNorm) -> Tensor<3> {
        self.down.forward_added(self.gated_normed(x.clone(), norm), x)
    }

    /// [`forward`](Self::forward) of what `norm` makes of `x`.
    pub fn forward_normed(&self, x: Tensor<3>, norm: &RmsNorm) -> Tensor<3> {
        self.down.forward(self.gated_normed(x, norm))
    }

    /// The gated products of what `norm` makes of `x`, `[batch, seq, intermediate]`.
    fn gated_normed(&self, x: Tensor<3>, norm: &RmsNorm) -> Tensor<3> {
        let around = || self.gate_up.around().with_norm(norm.fused()).with_gate(self.gating);
        let fused = self.gate_up.fused(&x, around);
        fused.unwrap_or_else(|| self.gated(norm.forward(x)))
    }

    /// The gated products of `x`, `[batch, seq, intermediate]`.
    fn gated(&self, x: Tensor<3>) -> Tensor<3> {
        if let Some(gated) = self.gate_up.forward_gated(&x, self.gating) {
            return gated;
        }
        let gate_up = self.gate_up.forward(x); // [batch, seq, 2 * intermediate]
        let _span = trace_span!(target: OPERATION, "gate").entered();
        in_f32(gate_up, |gate_up| {
            kv_weights::gated(gate_up, self.gating)
                .unwrap_or_else(|error| panic!("a gate: {error}"))
        })
    }
}

/// `f(x)` computed in f32, and rounded to the type of x.
pub fn in_f32(x: Tensor<3>, f: impl FnOnce(Tensor<3>) -> Tensor<3>) -> Tensor<3> {
    let dtype = x.dtype();
    f(x.cast(DType::F32)).cast(dtype)
}
