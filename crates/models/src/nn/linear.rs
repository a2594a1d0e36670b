//! Projections and embeddings, stored the way checkpoints store them.

use burn::{
    module::{Module, Param},
    nn,
    tensor::{Int, Tensor},
};

use kv_weights::{Fused, Gate};

use super::{matrix::Matrix, norm::RmsNorm};
use crate::spans;

/// `x W^T + b` with `W` as `[d_output, d_input]`, the layout of Hugging Face and GGUF files.
///
/// Burn's own `Linear` keeps `[d_input, d_output]`. Row-major `[d_output, d_input]` makes a decode
/// step a dot product per row, which reads the weights once and in order; it costs a large matmul
/// nothing, and files load without a transpose.
#[derive(Module, Debug)]
pub struct Linear {
    /// The weights, `[d_output, d_input]`.
    pub weight: Matrix,
    /// The bias, `[d_output]`.
    pub bias: Option<Param<Tensor<1>>>,
}

impl Linear {
    /// Applies the projection.
    ///
    /// # Shapes
    ///
    /// - x: `[batch, seq, d_input]`
    /// - output: `[batch, seq, d_output]`
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let _span = spans::reading(self.weight.id());
        let y = self.weight.project(x);
        match &self.bias {
            Some(bias) => y + bias.val().unsqueeze(),
            None => y,
        }
    }

    /// The projection of what `norm` makes of `x`, [`forward`](Self::forward) of it: one launch
    /// where weights are packed on a GPU and tokens few.
    pub fn forward_normed(&self, x: Tensor<3>, norm: &RmsNorm) -> Tensor<3> {
        let fused = || self.around().with_norm(norm.fused());
        self.fused(&x, fused).unwrap_or_else(|| self.forward(norm.forward(x)))
    }

    /// The projection of `x`, added to `residual`, `[batch, seq, d_output]`: one launch where
    /// [`forward_normed`](Self::forward_normed) is.
    pub fn forward_added(&self, x: Tensor<3>, residual: Tensor<3>) -> Tensor<3> {
        let fused = || self.around().with_residual(residual.clone());
        self.fused(&x, fused).unwrap_or_else(|| residual + self.forward(x))
    }

    /// The projection of `x`, of which one half goes through the gate and is multiplied with the
    /// other, `[batch, seq, d_output / 2]`: in one operation, for packed weights without an
    /// adapter.
    pub(super) fn forward_gated(&self, x: &Tensor<3>, gate: Gate) -> Option<Tensor<3>> {
        self.weight.is_only_packed().then(|| {
            let _span = spans::reading(self.weight.id());
            self.weight.project_fused(x, self.around().with_gate(gate))
        })
    }

    /// What is around its products.
    pub(super) fn around(&self) -> Fused {
        match &self.bias {
            Some(bias) => Fused::default().with_bias(bias.val()),
            None => Fused::default(),
        }
    }

    /// The products with what is `around` them, where it is one launch.
    pub(super) fn fused(&self, x: &Tensor<3>, around: impl FnOnce() -> Fused) -> Option<Tensor<3>> {
        self.weight.fuses(x).then(|| {
            let _span = spans::reading(self.weight.id());
            self.weight.project_fused(x, around())
        })
    }
}

/// Rows that are looked up.
#[derive(Module, Debug)]
pub struct Embedding {
    /// The rows, `[n, d_output]`.
    pub weight: Matrix,
}

impl Embedding {
    /// Looks rows up.
    ///
    /// # Shapes
    ///
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, d_output]`
    pub fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let _span = spans::reading(self.weight.id());
        self.weight.lookup(ids)
    }
}

impl From<nn::Embedding> for Embedding {
    fn from(embedding: nn::Embedding) -> Self {
        Self { weight: embedding.weight.into() }
    }
}
