use burn::{
    backend::Dispatch,
    tensor::{DType, Int, Tensor},
};

use super::project::check_width;
use crate::{Activations, Error, ExpertSelection, PackedExperts, Result, WeightOps};

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
    let picked = picked.cast(DType::I32).clamp(0, last).reshape([n * per_token]).into_dispatch();
    let x = x.reshape([n * of_token, columns]).into_dispatch();
    let words = experts.words().clone().into_dispatch();
    let picks =
        ExpertSelection { stride: experts.stride(), shared: per_token / of_token, activations };
    let y = <Dispatch as WeightOps>::packed_picked(x, words, picked, layout, picks);
    Ok(Tensor::<2>::from_dispatch(y).reshape([n, per_token, rows]))
}
