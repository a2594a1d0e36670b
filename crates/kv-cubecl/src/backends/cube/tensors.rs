//! Burn's CubeCL tensors as arguments of launches.

use burn::tensor::{DType, Shape};
use burn_cubecl::{
    cubecl::{ir::ElemType, prelude::BufferArg},
    ops::numeric::empty_device_contiguous_dtype,
    tensor::CubeTensor,
};

use crate::Result;

/// Unwraps the result of a launch. The crate's functions and caches have checked the limits of the
/// device before; only direct calls of [`KvCacheOps`] can panic here.
pub(super) fn launched(result: Result<()>) {
    if let Err(error) = result {
        panic!("{error}");
    }
}

pub(super) fn dims(tensor: &CubeTensor) -> [usize; 4] {
    tensor.meta.shape().dims()
}

pub(super) fn arg(tensor: &CubeTensor) -> BufferArg {
    tensor.clone().into_buffer_arg()
}

pub(super) fn elem(tensor: &CubeTensor) -> ElemType {
    burn::backend::cubecl::dtype_to_elem_type(tensor.dtype)
}

pub(super) fn empty_like<const D: usize>(
    like: &CubeTensor,
    shape: [usize; D],
    dtype: DType,
) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    empty_device_contiguous_dtype(client, device, Shape::new(shape), dtype)
}

/// The tensor itself if nothing else holds it, else a copy: what makes a write in place safe.
pub(super) fn writable(tensor: CubeTensor) -> CubeTensor {
    if tensor.can_mut() { tensor } else { tensor.copy() }
}
