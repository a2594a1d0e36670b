use burn::{
    backend::Dispatch,
    tensor::{DType, Device, Tensor},
};

use crate::{Error, Gate, Result, WeightOps, backends::check_device, fused::FEW};

/// Computes `f(a) * b` for the halves `a` and `b` of the last axis.
///
/// # Shapes
/// - `x`: `[batch, seq, 2 * outputs]`, f32
/// - output: `[batch, seq, outputs]`, f32
///
/// # Errors
/// [`Error::Shape`] for an odd last axis. [`Error::Unsupported`] for another type than f32 or for a
/// device without the operation.
pub fn gated(x: Tensor<3>, gate: Gate) -> Result<Tensor<3>> {
    let [batch, seq, width] = x.dims();
    if !width.is_multiple_of(2) {
        let (shape, rule) =
            (x.dims().to_vec(), "the last axis must be even, since half of it is gates");
        return Err(Error::Shape { op: "gated", tensor: "x", shape, rule: rule.into() });
    }
    if x.dtype() != DType::F32 {
        return Err(Error::Unsupported {
            what: format!("gated: x of type {:?}", x.dtype()),
            why: "it is computed in f32; cast it first".into(),
        });
    }
    check_device("gated", &x.device())?;
    if x.shape().num_elements() == 0 {
        return Ok(Tensor::zeros([batch, seq, width / 2], (&x.device(), DType::F32)));
    }
    let x = x.reshape([batch * seq, width]).into_dispatch();
    let y = <Dispatch as WeightOps>::packed_gate(x, gate);
    Ok(Tensor::<2>::from_dispatch(y).reshape([batch, seq, width / 2]))
}

/// Returns whether [`project_fused`](crate::project_fused) of `n` rows of activations is one launch
/// on this device, and so faster than separate operations.
///
/// That holds for few rows on WGPU and CUDA if no gradients are recorded.
pub fn fuses(n: usize, device: &Device) -> bool {
    #[cfg(feature = "cube")]
    {
        let is_cube = matches!(device.as_dispatch(), burn::backend::DispatchDevice::Cube(_));
        is_cube && n <= FEW && !device.is_autodiff()
    }
    #[cfg(not(feature = "cube"))]
    {
        let _ = (n, device, FEW);
        false
    }
}
