//! Token ids on their way into a model.

use burn::tensor::{Int, Tensor, TensorData};
use kv_cubecl::{On, Target};
use kv_models::LanguageModel;

use crate::{Error, Result};

/// Checks that the model knows every id.
pub(crate) fn check(ids: &[u32], model: &LanguageModel) -> Result<()> {
    match ids.iter().find(|&&id| id as usize >= model.vocab_size()) {
        None => Ok(()),
        Some(&id) => {
            let rule = format!("the model knows {} tokens", model.vocab_size());
            Err(Error::plan("token id", id, rule))
        }
    }
}

/// `[1, ids.len()]`.
pub(crate) fn tensor<T: Target>(ids: &[u32], device: &On<T>) -> Tensor<2, Int> {
    let values: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
    Tensor::from_data(TensorData::new(values, [1, ids.len()]), &**device)
}
