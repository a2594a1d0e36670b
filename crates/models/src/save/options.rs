//! Options for quantized models.

use std::sync::atomic::{AtomicBool, Ordering};

use kv_weights::{Quantize, WeightFormat};

use crate::{
    cache_config::ModelCacheConfig,
    decoder::Role,
    dtype::WeightDtype,
    error::{Error, Result},
};

/// Options of [`save_quantized`](super::save_quantized). Matrices without a format stay floats.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct QuantizeOptions<'a> {
    /// The format of the projections of attention.
    pub attention: Option<WeightFormat>,
    /// The format of the MLPs.
    pub mlp: Option<WeightFormat>,
    /// The format of the token embedding and the head.
    pub embedding: Option<WeightFormat>,
    /// The method that converts numbers to codes.
    pub quantize: Quantize,
    /// The type of tensors that stay floats; by default the type of the model.
    pub dtype: WeightDtype,
    /// The cache of the model, written as [`KV_CACHE_FILE`](crate::KV_CACHE_FILE).
    pub cache: Option<&'a ModelCacheConfig>,
    /// A flag that stops the work with [`Error::Interrupted`] when it is true.
    pub stop: Option<&'a AtomicBool>,
}

impl<'a> QuantizeOptions<'a> {
    /// Creates options with formats for attention, MLPs and embedding.
    pub fn new([attention, mlp, embedding]: [Option<WeightFormat>; 3]) -> Self {
        let (quantize, dtype) = (Quantize::default(), WeightDtype::Auto);
        Self { attention, mlp, embedding, quantize, dtype, cache: None, stop: None }
    }

    /// Sets the method that converts numbers to codes.
    #[must_use]
    pub fn with_quantize(self, quantize: Quantize) -> Self {
        Self { quantize, ..self }
    }

    /// Sets the type of tensors that stay floats.
    #[must_use]
    pub fn with_dtype(self, dtype: WeightDtype) -> Self {
        Self { dtype, ..self }
    }

    /// Sets the cache.
    #[must_use]
    pub fn with_cache(self, cache: Option<&'a ModelCacheConfig>) -> Self {
        Self { cache, ..self }
    }

    /// Sets the flag that [stops](Self::stop) the work.
    #[must_use]
    pub fn with_stop(self, stop: &'a AtomicBool) -> Self {
        Self { stop: Some(stop), ..self }
    }

    pub(super) fn check_stop(&self) -> Result<()> {
        match self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
            true => Err(Error::Interrupted),
            false => Ok(()),
        }
    }

    pub(super) fn format(&self, role: Option<Role>) -> Option<WeightFormat> {
        match role? {
            Role::Embedding | Role::Head => self.embedding,
            Role::Mlp => self.mlp,
            role if role.is_attention() => self.attention,
            _ => None,
        }
    }
}
