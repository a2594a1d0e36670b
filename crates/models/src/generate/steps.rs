use std::collections::BTreeSet;

use burn::tensor::{Device, Tensor};

use super::{DecodeGraph, ids_to_tensor};
use crate::{Error, LanguageModel, ModelCache, Result};

/// Appends one token at a time to the sequences of a cache, by launching every step anew or by
/// replaying a recording of it.
#[derive(Debug)]
pub enum Steps<'a> {
    /// The kernels of every step are launched one by one.
    Launched(&'a mut ModelCache),
    /// The step was recorded once and is replayed.
    Recorded(Box<DecodeGraph<'a>>),
}

impl<'a> Steps<'a> {
    /// Steps for the tokens after those in `cache`.
    ///
    /// # Errors
    ///
    /// `recorded` on a device that cannot record, and the errors of [`DecodeGraph::new`].
    pub fn new(
        model: &LanguageModel,
        cache: &'a mut ModelCache,
        recorded: bool,
        device: &Device,
    ) -> Result<Self> {
        if !recorded {
            return Ok(Self::Launched(cache));
        }
        let graph = DecodeGraph::new(model, cache, &BTreeSet::new(), device)?;
        match graph.is_captured() {
            true => Ok(Self::Recorded(Box::new(graph))),
            false => Err(cannot_record()),
        }
    }

    /// Tokens in the cache.
    pub fn position(&self) -> usize {
        match self {
            Self::Launched(cache) => cache.len(),
            Self::Recorded(graph) => graph.len(),
        }
    }

    /// Tokens that may still be appended.
    pub fn remaining(&self) -> usize {
        match self {
            Self::Launched(cache) => cache.remaining(),
            Self::Recorded(graph) => graph.remaining(),
        }
    }

    /// Appends one token to every sequence and returns the logits after it, `[batch, vocab]`, which the
    /// next step may overwrite.
    ///
    /// # Errors
    ///
    /// A number of ids other than one per sequence, no room for another token, or, when recorded,
    /// an id outside the vocabulary.
    pub fn step(
        &mut self,
        model: &LanguageModel,
        ids: &[u32],
        device: &Device,
    ) -> Result<Tensor<2>> {
        match self {
            Self::Launched(cache) => {
                let logits = model.step(ids_to_tensor(ids, [ids.len(), 1], device), cache)?;
                Ok(logits.squeeze_dim(1))
            }
            Self::Recorded(graph) => Ok(graph.step(ids)?.clone()),
        }
    }
}

/// The error for a device that cannot record the step.
pub(super) fn cannot_record() -> Error {
    Error::argument("recorded", true, "this device cannot record the step")
}
