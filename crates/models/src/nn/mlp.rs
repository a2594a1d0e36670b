//! The gated feed-forward block of the Llama family and similar models.

use burn::{
    module::Module,
    tensor::{DType, Tensor},
};

use tracing::trace_span;

use super::{linear::Linear, norm::RmsNorm};
use crate::spans::OPERATION;

/// The nonlinearity of a [`GatedMlp`].
pub use kv_weights::Gate as Gating;

/// `down(f(gate(x)) * up(x))` (<https://arxiv.org/abs/2002.05202>), with gate and up in one matrix.
#[derive(Module, Debug)]
pub struct GatedMlp {
    /// Gate rows, then up rows: `[2 * intermediate, hidden]`.
    pub gate_up: Linear,
    /// `[hidden, intermediate]`.
    pub down: Linear,
    /// The nonlinearity of the gate.
    #[module(skip)]
    pub gating: Gating,
}

impl GatedMlp {
    /// Applies the block.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden]`
    /// - output: `[batch, seq, hidden]`
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(self.gated(x))
    }

    /// Adds to `x` the block applied to its `norm`. Packed weights on a GPU do this in two launches
    /// for a few tokens.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden]`
    /// - output: `[batch, seq, hidden]`
    pub fn forward_added(&self, x: Tensor<3>, norm: &RmsNorm) -> Tensor<3> {
        self.down.forward_added(self.gated_normed(x.clone(), norm), x)
    }

    /// Applies `norm`, then the block as [`forward`](Self::forward) does.
    pub fn forward_normed(&self, x: Tensor<3>, norm: &RmsNorm) -> Tensor<3> {
        self.down.forward(self.gated_normed(x, norm))
    }

    /// Returns the gated products of the norm of `x`, `[batch, seq, intermediate]`.
    fn gated_normed(&self, x: Tensor<3>, norm: &RmsNorm) -> Tensor<3> {
        let around = || self.gate_up.around().with_norm(norm.fused()).with_gate(self.gating);
        let fused = self.gate_up.fused(&x, around);
        fused.unwrap_or_else(|| self.gated(norm.forward(x)))
    }

    /// Returns the gated products of `x`, `[batch, seq, intermediate]`.
    fn gated(&self, x: Tensor<3>) -> Tensor<3> {
        if let Some(gated) = self.gate_up.forward_gated(&x, self.gating) {
            return gated;
        }
        gated(self.gate_up.forward(x), self.gating)
    }
}

/// Applies a gate, `[_, _, 2 * intermediate]` to `[_, _, intermediate]`.
pub fn gated(gate_up: Tensor<3>, gating: Gating) -> Tensor<3> {
    let _span = trace_span!(target: OPERATION, "gate").entered();
    in_f32(gate_up, |gate_up| {
        kv_weights::gated(gate_up, gating).unwrap_or_else(|error| panic!("a gate: {error}"))
    })
}

/// Computes `f(x)` in f32 and rounds it to the type of x.
pub fn in_f32(x: Tensor<3>, f: impl FnOnce(Tensor<3>) -> Tensor<3>) -> Tensor<3> {
    let dtype = x.dtype();
    f(x.cast(DType::F32)).cast(dtype)
}

/// Bounds numbers by `cap`, if there is one: `cap * tanh(x / cap)`.
pub fn soft_capped<const D: usize>(x: Tensor<D>, cap: Option<f64>) -> Tensor<D> {
    match cap {
        Some(cap) => x.div_scalar(cap).tanh().mul_scalar(cap),
        None => x,
    }
}
