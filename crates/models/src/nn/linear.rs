//! A projection stored the way checkpoints store it.

use burn::{
    module::{Module, Param},
    tensor::Tensor,
};

/// `x W^T + b` with `W` as `[d_output, d_input]`, the layout of Hugging Face and GGUF files.
///
/// Burn's own `Linear` keeps `[d_input, d_output]`. Row-major `[d_output, d_input]` makes a decode
/// step a dot product per row, which reads the weights once and in order; it costs a large matmul
/// nothing, and files load without a transpose.
#[derive(Module, Debug)]
pub struct Linear {
    /// The weights, `[d_output, d_input]`.
    pub weight: Param<Tensor<2>>,
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
        let y = project(x, self.weight.val());
        match &self.bias {
            Some(bias) => y + bias.val().unsqueeze(),
            None => y,
        }
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
    x.reshape([batch * seq, d_input]).matmul(weight.transpose()).reshape([batch, seq, d_output])
}
