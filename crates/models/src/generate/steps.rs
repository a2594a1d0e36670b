//! One token after another.

use burn::tensor::{Device, Tensor};
use kv_sampling::Draw;

use super::{DecodeGraph, Sampling, ids_to_tensor, picker::Picker};
use crate::{Error, LanguageModel, ModelCache, Result};

/// Tokens from which on recording a step takes less time than it saves.
const RECORDED_TOKENS: usize = 80;

/// Appends one token at a time to the sequences of a cache, by launching every step anew or by
/// replaying a recording of it, and picks the next token of one sequence: on a GPU there, so that no logits are read,
/// unless tokens that occurred are penalized.
#[derive(Debug)]
pub struct Steps<'a> {
    way: Way<'a>,
    picker: Picker,
    /// Those that the next token is picked from, where the device has not done so.
    logits: Option<Tensor<2>>,
}

#[derive(Debug)]
enum Way<'a> {
    /// The kernels of every step are launched one by one.
    Launched(&'a mut ModelCache),
    /// The step was recorded once and is replayed.
    Recorded(Box<DecodeGraph<'a>>),
}

impl<'a> Steps<'a> {
    /// Steps for the tokens after those in `cache`, recorded or not.
    ///
    /// # Errors
    ///
    /// `recorded` on a device that cannot record, an invalid `sampling`, and the errors of [`DecodeGraph::new`].
    pub fn new(
        model: &LanguageModel,
        cache: &'a mut ModelCache,
        recorded: bool,
        sampling: Sampling,
        device: &Device,
    ) -> Result<Self> {
        let picker = Picker::new(sampling, device)?;
        if !recorded {
            return Ok(Self { way: Way::Launched(cache), picker, logits: None });
        }
        let draw = picker.draw().unwrap_or(Draw::GREEDY);
        let graph = DecodeGraph::new(model, cache, &Default::default(), draw, device)?;
        match graph.is_captured() {
            true => Ok(Self { way: Way::Recorded(Box::new(graph)), picker, logits: None }),
            false => Err(cannot_record()),
        }
    }

    /// Whether a step is best recorded where nobody says: on a device that can, for a model that computes no more
    /// then, and for enough tokens.
    pub fn pays_recorded(
        model: &LanguageModel,
        cache: &ModelCache,
        tokens: usize,
        device: &Device,
    ) -> bool {
        tokens >= RECORDED_TOKENS
            && model.decoder().captures()
            && cache.is_even()
            && DecodeGraph::is_supported(device)
    }

    /// Whether steps are recorded.
    pub fn is_recorded(&self) -> bool {
        matches!(self.way, Way::Recorded(_))
    }

    /// Tokens in the cache.
    pub fn position(&self) -> usize {
        match &self.way {
            Way::Launched(cache) => cache.len(),
            Way::Recorded(graph) => graph.len(),
        }
    }

    /// Tokens that may still be appended.
    pub fn remaining(&self) -> usize {
        match &self.way {
            Way::Launched(cache) => cache.remaining(),
            Way::Recorded(graph) => graph.remaining(),
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
        self.logits = None;
        match &mut self.way {
            Way::Launched(cache) => {
                let logits = model.step(ids_to_tensor(ids, [ids.len(), 1], device), cache)?;
                let logits = logits.squeeze_dim::<2>(1);
                self.logits = Some(logits.clone());
                Ok(logits)
            }
            Way::Recorded(graph) => {
                let logits = graph.step(ids)?.clone();
                if self.picker.draw().is_none() {
                    self.logits = Some(logits.clone());
                }
                Ok(logits)
            }
        }
    }

    /// Takes the logits of a prompt, `[1, vocab]`, to pick the first token from.
    pub fn start(&mut self, logits: Tensor<2>) {
        self.logits = Some(logits);
    }

    /// Picks the token after the last [`step`](Self::step) or the [prompt](Self::start). `text`
    /// holds the ids so far.
    ///
    /// # Errors
    ///
    /// Logits that are not numbers, or on a GPU not finite, those of several texts, and no step before.
    pub fn pick(&mut self, text: &[u32]) -> Result<u32> {
        match (self.logits.take(), &mut self.way) {
            (Some(logits), _) => self.picker.pick(logits, text),
            (None, Way::Recorded(graph)) => graph.picked(),
            (None, Way::Launched(_)) => {
                Err(Error::argument("logits", "none", "a step or a prompt comes first"))
            }
        }
    }
}

/// The error for a device that cannot record the step.
pub(super) fn cannot_record() -> Error {
    Error::argument("recorded", true, "this device cannot record the step")
}
