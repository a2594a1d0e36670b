//! [`Steps`]: decode steps, with or without graph capture.

use burn::tensor::{Device, Tensor};
use kv_sampling::Draw;

use super::{
    DecodeGraph, Guesses, Sampling, Speculate, ids_to_tensor, picker::Picker, speculate::Drafting,
};
use crate::{
    cache::ModelCache,
    error::{Error, Result},
    model::LanguageModel,
};

/// The number of tokens from which graph capture saves more time than it takes.
const GRAPH_CAPTURE_TOKENS: usize = 80;

/// Appends one token at a time to the sequences of a cache, with launched or captured steps, and
/// picks the next token of a single sequence. On a GPU, the device picks it without reading logits,
/// unless penalties apply.
#[derive(Debug)]
pub struct Steps<'a> {
    way: Way<'a>,
    picker: Picker,
    /// The logits from which the host picks the next token.
    logits: Option<Tensor<2>>,
}

#[derive(Debug)]
enum Way<'a> {
    /// Launches the kernels of every step.
    Launched(&'a mut ModelCache),
    /// Launches passes over guessed tokens, too.
    Drafting(Box<Drafting<'a>>),
    /// Replays a captured step.
    Replayed(Box<DecodeGraph<'a>>),
}

impl<'a> Steps<'a> {
    /// Prepares steps after the tokens in `cache`. With `graph_capture`, a step is captured once
    /// and replayed.
    ///
    /// # Errors
    /// Fails for `graph_capture` on a device that does not support it, for an invalid `sampling`,
    /// and as [`DecodeGraph::new`] does.
    pub fn new(
        model: &LanguageModel,
        cache: &'a mut ModelCache,
        graph_capture: bool,
        sampling: Sampling,
        device: &Device,
    ) -> Result<Self> {
        let picker = Picker::new(sampling, device)?;
        if !graph_capture {
            return Ok(Self { way: Way::Launched(cache), picker, logits: None });
        }
        let draw = picker.draw().unwrap_or(Draw::GREEDY);
        let graph = DecodeGraph::new(model, cache, &Default::default(), draw, device)?;
        match graph.is_captured() {
            true => Ok(Self { way: Way::Replayed(Box::new(graph)), picker, logits: None }),
            false => Err(no_graph_capture()),
        }
    }

    /// Prepares steps without graph capture after `text`, whose tokens are in `cache`, with guesses
    /// of the next tokens. [`finish`](Self::finish) must follow the last step.
    ///
    /// # Errors
    /// Fails for an invalid `sampling`, and where `speculate` asks for guesses that the cache does
    /// not [take](ModelCache::takes_drafts).
    pub fn with_guesses(
        cache: &'a mut ModelCache,
        speculate: &Speculate,
        text: &[u32],
        sampling: Sampling,
        device: &Device,
    ) -> Result<Self> {
        let picker = Picker::new(sampling, device)?;
        let way = match Drafting::new(speculate, cache, text, device)? {
            Ok(drafting) => Way::Drafting(Box::new(drafting)),
            Err(cache) => Way::Launched(cache),
        };
        Ok(Self { way, picker, logits: None })
    }

    /// Returns whether graph capture pays off: the device supports it, the model computes no more
    /// with it, and there are enough tokens.
    pub fn graph_capture_pays(
        model: &LanguageModel,
        cache: &ModelCache,
        tokens: usize,
        device: &Device,
    ) -> bool {
        tokens >= GRAPH_CAPTURE_TOKENS
            && model.decoder().captures()
            && cache.is_even()
            && DecodeGraph::is_supported(device)
    }

    /// Returns whether steps use graph capture.
    pub fn uses_graph_capture(&self) -> bool {
        matches!(self.way, Way::Replayed(_))
    }

    /// Returns the number of tokens so far.
    pub fn position(&self) -> usize {
        match &self.way {
            Way::Launched(cache) => cache.len(),
            Way::Drafting(drafting) => drafting.len(),
            Way::Replayed(graph) => graph.len(),
        }
    }

    /// Returns how many tokens can still be appended.
    pub fn remaining(&self) -> usize {
        match &self.way {
            Way::Launched(cache) => cache.remaining(),
            Way::Drafting(drafting) => drafting.remaining(),
            Way::Replayed(graph) => graph.remaining(),
        }
    }

    /// Returns the guesses so far.
    pub fn guesses(&self) -> Guesses {
        match &self.way {
            Way::Drafting(drafting) => drafting.guesses(),
            Way::Launched(_) | Way::Replayed(_) => Guesses::default(),
        }
    }

    /// Appends the tokens of the last pass to the cache, if they had been guessed.
    ///
    /// # Errors
    /// Fails as [`PendingTokens::keep`](crate::PendingTokens::keep) does.
    pub fn finish(&mut self) -> Result<()> {
        match &mut self.way {
            Way::Drafting(drafting) => drafting.finish(),
            Way::Launched(_) | Way::Replayed(_) => Ok(()),
        }
    }

    /// Appends one token to every sequence and returns the logits after it, `[batch, vocab]`. The
    /// next step may overwrite them.
    ///
    /// # Errors
    /// Fails unless there is one id per sequence, for a full cache, and with graph capture for an
    /// id outside the vocabulary.
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
            Way::Drafting(drafting) => {
                let &[id] = ids else {
                    return Err(Error::argument("ids", ids.len(), "must be one with guesses"));
                };
                let logits = drafting.step(model, id, device)?;
                self.logits = Some(logits.clone());
                Ok(logits)
            }
            Way::Replayed(graph) => {
                let logits = graph.step(ids)?.clone();
                if self.picker.draw().is_none() {
                    self.logits = Some(logits.clone());
                }
                Ok(logits)
            }
        }
    }

    /// Sets the logits of a prompt, `[1, vocab]`, from which the first token is picked.
    pub fn start(&mut self, logits: Tensor<2>) {
        self.logits = Some(logits);
    }

    /// Picks the token after the last [`step`](Self::step) or the [prompt](Self::start). `text`
    /// holds the ids so far.
    ///
    /// # Errors
    /// Fails for logits that are NaN, and on a GPU for any that are not finite; for logits of
    /// several texts; and without a step before.
    pub fn pick(&mut self, text: &[u32]) -> Result<u32> {
        match (self.logits.take(), &mut self.way) {
            (Some(logits), _) => self.picker.pick(logits, text),
            (None, Way::Replayed(graph)) => graph.picked(),
            (None, Way::Launched(_) | Way::Drafting(_)) => {
                Err(Error::argument("logits", "none", "must follow a step or a prompt"))
            }
        }
    }
}

/// Returns the error for a device without graph capture.
pub(super) fn no_graph_capture() -> Error {
    Error::argument("graph_capture", true, "this device does not support graph capture")
}
