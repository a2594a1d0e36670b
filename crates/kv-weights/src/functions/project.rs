use burn::{
    backend::Dispatch,
    tensor::{DType, Device, Tensor},
};

use crate::{
    Activations, Error, PackedMatrix, Result, WeightOps,
    backends::{check_bytes, check_device},
};

/// Computes `x W^T`. Gradients flow to `x`, not to the weights.
///
/// An activation that is NaN or infinite makes all products of its row NaN.
///
/// # Shapes
/// - `x`: `[batch, seq, columns]`, f32
/// - output: `[batch, seq, rows]`, f32
///
/// # Errors
/// [`Error::Shape`] for a wrong number of columns. [`Error::Unsupported`] for another type than
/// f32, for a device without the operation, or if the products exceed its largest buffer.
pub fn project(x: Tensor<3>, matrix: &PackedMatrix, activations: Activations) -> Result<Tensor<3>> {
    check("project", &x, matrix)?;
    let ([batch, seq, columns], [rows, _]) = (x.dims(), matrix.dims());
    if batch * seq == 0 {
        return Ok(Tensor::zeros([batch, seq, rows], (&x.device(), DType::F32)));
    }
    check_output("project", batch * seq, rows, &x.device())?;
    let x = x.reshape([batch * seq, columns]).into_dispatch();
    let words = matrix.words().clone().into_dispatch();
    let y = <Dispatch as WeightOps>::packed_project(x, words, matrix.layout(), activations);
    Ok(Tensor::<2>::from_dispatch(y).reshape([batch, seq, rows]))
}

/// Computes `y W`: the gradient with respect to the input of [`project`], given the gradient `y`
/// with respect to its output.
///
/// Restores one part of the matrix at a time. Records no gradient of its own.
///
/// # Shapes
/// - `y`: `[batch, seq, rows]`, f32
/// - output: `[batch, seq, columns]`, f32
///
/// # Errors
/// [`Error::Shape`] for a wrong number of rows. [`Error::Unsupported`] for another type than f32 or
/// for a device without the operation.
pub fn back_project(y: Tensor<3>, matrix: &PackedMatrix) -> Result<Tensor<3>> {
    let ([batch, seq, _], [rows, columns]) = (y.dims(), matrix.dims());
    let width = (rows, "the rows of the matrix");
    check_width("back_project", ("y", &y), width, &matrix.device())?;
    if batch * seq == 0 {
        return Ok(Tensor::zeros([batch, seq, columns], (&y.device(), DType::F32)));
    }
    let y = y.reshape([batch * seq, rows]).into_dispatch();
    let words = matrix.words().clone().into_dispatch();
    let x = <Dispatch as WeightOps>::packed_project_backward(y, words, matrix.layout());
    Ok(Tensor::<2>::from_dispatch(x).reshape([batch, seq, columns]))
}

/// Checks that the device has a buffer for `[n, rows]` products.
pub(super) fn check_output(op: &str, n: usize, rows: usize, device: &Device) -> Result<()> {
    let bytes = n.saturating_mul(rows).saturating_mul(size_of::<f32>());
    check_bytes(|| format!("{op} to [{n}, {rows}] products"), bytes, device)
}

/// Checks that `x` can be multiplied with `matrix`.
pub(super) fn check(op: &'static str, x: &Tensor<3>, matrix: &PackedMatrix) -> Result<()> {
    check_width(op, ("x", x), (matrix.dims()[1], "the columns of the matrix"), &matrix.device())
}

/// Checks width, type and devices of a product.
pub(super) fn check_width(
    op: &'static str,
    (tensor, x): (&'static str, &Tensor<3>),
    (width, which): (usize, &str),
    weights: &Device,
) -> Result<()> {
    let [batch, seq, found] = x.dims();
    if found != width {
        return Err(Error::Shape {
            op,
            tensor,
            shape: vec![batch, seq, found],
            rule: format!("the last axis must be {width}, {which}"),
        });
    }
    if x.dtype() != DType::F32 {
        return Err(Error::Unsupported {
            what: format!("{op}: {tensor} of type {:?}", x.dtype()),
            why: "it is computed in f32; cast it first".into(),
        });
    }
    check_device(op, &x.device())?;
    check_device(op, weights)
}
