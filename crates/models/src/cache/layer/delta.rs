//! Saves the states of recurrent layers.

use burn::tensor::{Device, Tensor, TensorData};
use kv_cubecl::{
    MemoryBytes,
    delta::{DeltaConfig, DeltaPart, DeltaState, HeadOrder},
};

use super::part::{Part, PartName, readable};
use crate::error::{Error, Result};

/// The tensors of a [`DeltaState`].
pub(super) const PARTS: [PartName; 2] = [
    PartName { name: DeltaPart::Conv.name(), words: false },
    PartName { name: DeltaPart::State.name(), words: false },
];

pub(super) fn memory_bytes(bytes: usize) -> MemoryBytes {
    MemoryBytes { keys: 0, values: 0, floats: bytes }
}

pub(super) fn parts(config: &DeltaConfig, batch: usize) -> Result<Vec<Part>> {
    let parts = config.parts(batch)?.into_iter();
    Ok(parts.map(|part| Part { name: part.name, dtype: part.dtype, shape: part.shape }).collect())
}

/// Reads the tensors of a state.
pub(super) fn into_data(state: &DeltaState) -> Result<Vec<TensorData>> {
    let (conv, state) = state.parts();
    [conv.try_into_data(), state.try_into_data()].into_iter().map(readable).collect()
}

/// Makes a state of its tensors.
pub(super) fn restore(
    config: &DeltaConfig,
    lens: Vec<usize>,
    data: Vec<TensorData>,
    device: &Device,
) -> Result<DeltaState> {
    let Ok([conv, state]) = <[TensorData; 2]>::try_from(data) else {
        return Err(Error::argument("parts", "another number", "must be two"));
    };
    let (conv_type, state_type) = (conv.dtype(), state.dtype());
    let conv = Tensor::from_data(conv, (device, conv_type));
    let state = Tensor::from_data(state, (device, state_type));
    Ok(DeltaState::from_parts(config, lens, conv, state, device)?)
}

pub(super) fn fields(config: &DeltaConfig) -> Vec<(&'static str, String)> {
    let heads = format!("{} for {} of keys", config.n_value_heads, config.n_key_heads);
    let head_dim = format!("{} and {} of values", config.head_dim.keys, config.head_dim.values);
    let order = match config.order {
        HeadOrder::Grouped => "grouped",
        HeadOrder::Tiled => "tiled",
    };
    vec![
        ("value heads", heads),
        ("head_dim", head_dim),
        ("conv_tokens", config.conv_tokens.to_string()),
        ("order of value heads", order.into()),
        ("state", config.float.name().into()),
    ]
}
