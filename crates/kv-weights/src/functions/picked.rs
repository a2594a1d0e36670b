use burn::{
    backend::Dispatch,
    tensor::{DType, Int, Tensor},
};

use super::project::check;
use crate::{Activations, Error, PackedMatrix, Result, WeightOps, error::invalid};

/// How the rows of a matrix are those of experts, and which rows of activations these take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Picks {
    /// Rows of an expert.
    pub rows: usize,
    /// Picks that share a row of activations.
    pub shared: usize,
    /// What products are made of.
    pub activations: Activations,
}

/// Products with the experts that are picked for each token, whose numbers may still be on their way to the host: what a
/// mixture of experts computes in a step.
///
/// `experts` are the matrices of all experts, `n_experts` of equally many rows, one after the other. A number of
/// `picked` that is no expert's counts as the nearest that is. Records no gradient.
///
/// # Shapes
/// - `x`: `[n, 1, columns]`, the same for all experts of a token, or `[n, per_token, columns]`, f32
/// - `picked`: `[n, per_token]`
/// - output: `[n, per_token, rows of an expert]`, f32
///
/// # Errors
/// [`Error::Shape`] for shapes that do not go together, [`Error::Invalid`] for rows that are not those of so many
/// experts, [`Error::Unsupported`] for another type than f32 or for a device without the operation.
pub fn project_picked(
    x: Tensor<3>,
    experts: &PackedMatrix,
    n_experts: usize,
    picked: Tensor<2, Int>,
    activations: Activations,
) -> Result<Tensor<3>> {
    const OP: &str = "project_picked";
    check(OP, &x, experts)?;
    let ([n, of_token, columns], [tokens, per_token]) = (x.dims(), picked.dims());
    let rows = experts.layout().rows();
    if n_experts == 0 || !rows.is_multiple_of(n_experts) {
        let rule = format!("must divide {rows}, the rows of all experts");
        return Err(invalid("n_experts", n_experts, rule));
    }
    if n != tokens || ![1, per_token].contains(&of_token) {
        let rule = format!("must be [{tokens}, 1 or {per_token}, {columns}], as picked says");
        return Err(Error::Shape { op: OP, tensor: "x", shape: x.dims().to_vec(), rule });
    }
    let rows = rows / n_experts;
    if n * per_token == 0 {
        return Ok(Tensor::zeros([n, per_token, rows], (&x.device(), DType::F32)));
    }
    let last = i64::try_from(n_experts - 1).unwrap_or(i64::MAX);
    let picked = picked.cast(DType::I32).clamp(0, last).reshape([n * per_token]).into_dispatch();
    let x = x.reshape([n * of_token, columns]).into_dispatch();
    let words = experts.words().clone().into_dispatch();
    let picks = Picks { rows, shared: per_token / of_token, activations };
    let y = <Dispatch as WeightOps>::packed_picked(x, words, picked, experts.layout(), picks);
    Ok(Tensor::<2>::from_dispatch(y).reshape([n, per_token, rows]))
}
