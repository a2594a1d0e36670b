//! Products with matrices of floats.

use burn::tensor::Tensor;

/// Returns `x W^T` for a weight of `[d_output, d_input]`, without materializing the transpose.
///
/// # Shapes
/// - x: `[batch, seq, d_input]`
/// - output: `[batch, seq, d_output]`
pub fn project(x: Tensor<3>, weight: Tensor<2>) -> Tensor<3> {
    let [batch, seq, d_input] = x.dims();
    let [d_output, _] = weight.dims();
    // This is one two-dimensional product over all rows. A batched product would reshape the
    // transposed view, which copies the weights on every call.
    let x = x.reshape([batch * seq, d_input]);
    #[cfg(feature = "flex")]
    if let Some(y) =
        super::bf16::project(&x, &weight).or_else(|| super::few_rows::project(&x, &weight))
    {
        return y.reshape([batch, seq, d_output]);
    }
    x.matmul(weight.transpose()).reshape([batch, seq, d_output])
}
