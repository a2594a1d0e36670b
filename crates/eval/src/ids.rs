//! Checks of token ids.

use kv_models::LanguageModel;

use crate::{Error, Result};

pub(crate) fn check(ids: &[u32], model: &LanguageModel) -> Result<()> {
    match ids.iter().find(|&&id| id as usize >= model.vocab_size()) {
        None => Ok(()),
        Some(&id) => {
            let rule = format!("the model knows {} tokens", model.vocab_size());
            Err(Error::plan("token id", id, rule))
        }
    }
}
