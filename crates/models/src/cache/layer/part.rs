//! The tensors of a layer's cache.

use burn::tensor::{DType, TensorData};

use crate::error::{Error, Result};

/// The name of a tensor of a layer's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cache) struct PartName {
    pub(in crate::cache) name: &'static str,
    /// True for a list of u32 words, false for rows of floats.
    pub(in crate::cache) words: bool,
}

/// A tensor of a layer's cache without its numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cache) struct Part {
    pub(in crate::cache) name: &'static str,
    pub(in crate::cache) dtype: DType,
    pub(in crate::cache) shape: Vec<usize>,
}

/// Names an error of reading a tensor from the device.
pub(super) fn readable<E: ToString>(
    data: core::result::Result<TensorData, E>,
) -> Result<TensorData> {
    data.map_err(|error| Error::argument("cache", error.to_string(), "must be readable"))
}
