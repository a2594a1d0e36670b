use burn::{
    backend::Dispatch,
    tensor::{DType, Tensor},
};

use crate::{Activations, Error, PackedMatrix, Result, WeightOps, backends::check_device};

/// `x W^T` for the rows of `matrix`. Its gradient is that with respect to `x`; the weights have none.
///
/// An activation that is NaN or infinite makes all products of its row NaN.
///
/// # Shapes
/// - `x`: `[batch, seq, columns]`, f32
/// - output: `[batch, seq, rows]`, f32
///
/// # Errors
/// [`Error::Shape`] for another number of columns, [`Error::Unsupported`] for another type or for a device
/// without the operation.
pub fn project(x: Tensor<3>, matrix: &PackedMatrix, activations: Activations) -> Result<Tensor<3>> {
    check("project", &x, matrix)?;
    let ([batch, seq, columns], [rows, _]) = (x.dims(), matrix.dims());
    if batch * seq == 0 {
        return Ok(Tensor::zeros([batch, seq, rows], (&x.device(), DType::F32)));
    }
    let x = x.reshape([batch * seq, columns]).into_dispatch();
    let words = matrix.words().clone().into_dispatch();
    let y = <Dispatch as WeightOps>::packed_project(x, words, matrix.layout(), activations);
    Ok(Tensor::<2>::from_dispatch(y).reshape([batch, seq, rows]))
}

/// Checks that the operation `op` can multiply `x` with `matrix`.
pub(super) fn check(op: &'static str, x: &Tensor<3>, matrix: &PackedMatrix) -> Result<()> {
    let ([batch, seq, width], [_, columns]) = (x.dims(), matrix.dims());
    if width != columns {
        return Err(Error::Shape {
            op,
            tensor: "x",
            shape: vec![batch, seq, width],
            rule: format!("the last axis must be {columns}, the columns of the matrix"),
        });
    }
    if x.dtype() != DType::F32 {
        return Err(Error::Unsupported {
            what: format!("{op}: x of type {:?}", x.dtype()),
            why: "it is computed in f32; cast it first".into(),
        });
    }
    check_device(op, &x.device())?;
    check_device(op, &matrix.device())
}
