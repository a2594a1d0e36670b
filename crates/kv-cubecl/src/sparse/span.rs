//! The tokens of a call on the device.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// Returns the span of a call for [`SparseOps`](super::SparseOps): the tokens before it, and the
/// number of new ones.
pub(super) fn span(starts: &[usize], counts: &[usize], device: &Device) -> Tensor<2, Int> {
    let numbers: Vec<i32> = starts.iter().chain(counts).map(|&n| n as i32).collect();
    Tensor::from_data(TensorData::new(numbers, [2, starts.len()]), (device, DType::I32))
}
