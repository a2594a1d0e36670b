//! Tensors of zeros, from which empty caches are made.

#[cfg(feature = "flex")]
use burn::tensor::{Bytes, TensorData};
use burn::tensor::{DType, Device, Tensor, kind::Numeric};

#[cfg(feature = "flex")]
use crate::{Flex, Target};

/// Creates a tensor of zeros, in the elements' alignment: `Tensor::zeros` on the CPU (burn-flex
/// 0.22.1) copies its bytes to align them to 16, so twice the memory is held for a moment. Without
/// the copy, the operating system provides a page only when it is first used.
pub(crate) fn zeros<const D: usize, K: Numeric>(
    shape: [usize; D],
    device: &Device,
    dtype: DType,
) -> Tensor<D, K> {
    #[cfg(feature = "flex")]
    if Flex::hosts(device) {
        let n = shape.iter().product();
        let bytes = match dtype.size() {
            2 => Some(Bytes::from_elems(vec![0_u16; n])),
            4 => Some(Bytes::from_elems(vec![0_u32; n])),
            _ => None,
        };
        if let Some(bytes) = bytes {
            let data = TensorData::from_bytes(bytes, shape, dtype);
            return Tensor::from_data(data, (device, dtype));
        }
    }
    Tensor::zeros(shape, (device, dtype))
}
