use burn::{
    backend::Dispatch,
    tensor::{DType, Int, Tensor, TensorData},
};

use super::project::{check, check_width};
use crate::{
    Activations, Error, ExpertSelection, PackedExperts, PackedLayout, PackedMatrix, Result,
    WeightOps,
};

/// Multiplies activations with the experts picked for each token: one step of a mixture of experts.
///
/// The numbers of the experts stay on the device. A number outside the range selects the nearest
/// expert. Records no gradient.
///
/// # Shapes
/// - `x`: `[n, 1, columns]`, the same for all experts of a token, or `[n, per_token, columns]`, f32
/// - `picked`: `[n, per_token]`
/// - output: `[n, per_token, rows of an expert]`, f32
///
/// # Errors
/// [`Error::Shape`] for shapes that do not match. [`Error::Unsupported`] for another type than f32
/// or for a device without the operation.
pub fn project_picked(
    x: Tensor<3>,
    experts: &PackedExperts,
    picked: Tensor<2, Int>,
    activations: Activations,
) -> Result<Tensor<3>> {
    const OP: &str = "project_picked";
    let layout = experts.layout();
    let width = (layout.columns(), "the columns of an expert");
    check_width(OP, ("x", &x), width, &experts.device())?;
    let ([n, of_token, columns], [tokens, per_token]) = (x.dims(), picked.dims());
    let rows = layout.rows();
    if n != tokens || ![1, per_token].contains(&of_token) {
        let rule = format!("must be [{tokens}, 1 or {per_token}, {columns}] to match picked");
        return Err(Error::Shape { op: OP, tensor: "x", shape: x.dims().to_vec(), rule });
    }
    if n * per_token == 0 {
        return Ok(Tensor::zeros([n, per_token, rows], (&x.device(), DType::F32)));
    }
    let last = i64::try_from(experts.len() - 1).unwrap_or(i64::MAX);
    let picked = picked.cast(DType::I32).clamp(0, last).reshape([n * per_token]);
    let x = x.reshape([n * of_token, columns]);
    let picks =
        ExpertSelection { stride: experts.stride(), shared: per_token / of_token, activations };
    Ok(products(x, experts.words(), picked, layout, picks).reshape([n, per_token, rows]))
}

/// Multiplies the activations of each head with the rows of that head: `matrix` has equally many
/// rows for each of them. Records no gradient.
///
/// # Shapes
/// - `x`: `[n, n_heads, columns]`, f32
/// - output: `[n, n_heads, rows / n_heads]`, f32
///
/// # Errors
/// [`Error::Shape`] for a wrong number of columns. [`Error::Invalid`] if the rows cannot be divided
/// into heads of whole words. [`Error::Unsupported`] for another type than f32 or for a device
/// without the operation.
pub fn project_heads(
    x: Tensor<3>,
    matrix: &PackedMatrix,
    activations: Activations,
) -> Result<Tensor<3>> {
    check("project_heads", &x, matrix)?;
    let [n, n_heads, columns] = x.dims();
    let heads = PackedExperts::from_rows(matrix, n_heads)?;
    let layout = heads.layout();
    if n == 0 {
        return Ok(Tensor::zeros([n, n_heads, layout.rows()], (&x.device(), DType::F32)));
    }
    let numbers: Vec<i32> = (0..n * n_heads).map(|i| (i % n_heads) as i32).collect();
    let data = TensorData::new(numbers, [n * n_heads]);
    let picked = Tensor::from_data(data, (&x.device(), DType::I32));
    let picks = ExpertSelection { stride: heads.stride(), shared: 1, activations };
    let y = products(x.reshape([n * n_heads, columns]), heads.words(), picked, layout, picks);
    Ok(y.reshape([n, n_heads, layout.rows()]))
}

/// Returns the products of rows of `x` with the matrices of these numbers, `[n, rows]`.
fn products(
    x: Tensor<2>,
    words: &Tensor<1, Int>,
    picked: Tensor<1, Int>,
    layout: PackedLayout,
    picks: ExpertSelection,
) -> Tensor<2> {
    let (x, words) = (x.into_dispatch(), words.clone().into_dispatch());
    let picked = picked.into_dispatch();
    Tensor::from_dispatch(<Dispatch as WeightOps>::packed_picked(x, words, picked, layout, picks))
}
