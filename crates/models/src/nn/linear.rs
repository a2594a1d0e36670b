//! Projections and embeddings in the layout of checkpoints.

use burn::{
    module::{Module, Param},
    nn,
    tensor::{Int, Tensor},
};

use kv_weights::{Fused, Gate};

use super::{matrix::Matrix, norm::RmsNorm};

/// `x W^T + b` with `W` as `[d_output, d_input]`, the layout of Hugging Face and GGUF files.
///
/// Burn's own `Linear` uses `[d_input, d_output]`. With row-major `[d_output, d_input]`, a decode
/// step is a dot product per row, which reads the weights once and in order. Large matrix products
/// are as fast, and files load without a transpose.
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
    /// - x: `[batch, seq, d_input]`
    /// - output: `[batch, seq, d_output]`
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let _span = self.weight.read();
        let y = self.weight.project(x);
        match &self.bias {
            Some(bias) => y + bias.val().unsqueeze(),
            None => y,
        }
    }

    /// Applies `norm` to `x`, then the projection. Packed weights on a GPU do this in one launch
    /// for a few tokens.
    pub fn forward_normed(&self, x: Tensor<3>, norm: &RmsNorm) -> Tensor<3> {
        let fused = || self.around().with_norm(norm.fused());
        self.fused(&x, fused).unwrap_or_else(|| self.forward(norm.forward(x)))
    }

    /// Applies the projection to `x` and adds it to `residual`, `[batch, seq, d_output]`, in one
    /// launch where [`forward_normed`](Self::forward_normed) needs one.
    pub fn forward_added(&self, x: Tensor<3>, residual: Tensor<3>) -> Tensor<3> {
        let fused = || self.around().with_residual(residual.clone());
        self.fused(&x, fused).unwrap_or_else(|| residual + self.forward(x))
    }

    /// Applies the projection to `x`, applies the gate to one half of the result, and multiplies it
    /// with the other half, `[batch, seq, d_output / 2]`. This is one operation for packed weights
    /// without an adapter, and `None` for others.
    pub(super) fn forward_gated(&self, x: &Tensor<3>, gate: Gate) -> Option<Tensor<3>> {
        self.weight.is_only_packed().then(|| {
            let _span = self.weight.read();
            self.weight.project_fused(x, self.around().with_gate(gate))
        })
    }

    pub(super) fn around(&self) -> Fused {
        match &self.bias {
            Some(bias) => Fused::default().with_bias(bias.val()),
            None => Fused::default(),
        }
    }

    /// Returns the products with the operations `around` them, if that is one launch.
    pub(super) fn fused(&self, x: &Tensor<3>, around: impl FnOnce() -> Fused) -> Option<Tensor<3>> {
        self.weight.fuses(x).then(|| {
            let _span = self.weight.read();
            self.weight.project_fused(x, around())
        })
    }
}

/// A table whose rows are looked up.
#[derive(Module, Debug)]
pub struct Embedding {
    /// The rows, `[n, d_output]`.
    pub weight: Matrix,
}

impl Embedding {
    /// Looks up rows.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, d_output]`
    pub fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let _span = self.weight.read_rows(ids.dims().iter().product());
        self.weight.lookup(ids)
    }
}

impl From<nn::Embedding> for Embedding {
    fn from(embedding: nn::Embedding) -> Self {
        Self { weight: embedding.weight.into() }
    }
}
