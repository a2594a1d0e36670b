//! Projections and embeddings, stored the way checkpoints store them.

use burn::{
    module::{Module, Param},
    nn,
    tensor::{Int, Tensor},
};

use super::Matrix;
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

/// `x W^T` for a weight of `[d_output, d_input]`, without materializing the transpose.
///
/// # Shapes
///
/// - x: `[batch, seq, d_input]`
/// - output: `[batch, seq, d_output]`
pub fn project(x: Tensor<3>, weight: Tensor<2>) -> Tensor<3> {
    let [batch, seq, d_input] = x.dims();
    let [d_output, _] = weight.dims();
    // One two-dimensional matmul over all rows: a batched one would reshape the transposed view,
    // which copies the weights on every call.
    let x = x.reshape([batch * seq, d_input]);
    #[cfg(feature = "flex")]
    if let Some(y) =
        super::bf16::project(&x, &weight).or_else(|| super::few_rows::project(&x, &weight))
    {
        return y.reshape([batch, seq, d_output]);
    }
    x.matmul(weight.transpose()).reshape([batch, seq, d_output])
}
