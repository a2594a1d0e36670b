//! Speculative decoding (Leviathan et al., 2022, <https://arxiv.org/abs/2211.17192>): the next
//! tokens are guessed, and one pass over the cache computes the logits after all of them.
//!
//! A token is always picked from the model's own logits, with the sampler's next random number, as
//! without guesses. A guess that equals it saves a step. So guesses change the time that a text
//! takes, and not its distribution.

mod draft_model;
mod drafter;
mod lookup;
mod pace;

use std::fmt;

use burn::tensor::{Device, Tensor};

pub use self::draft_model::DraftModel;
use self::{draft_model::ModelDrafter, lookup::Lookup};
pub(super) use self::{drafter::Drafter, pace::Pace};
use crate::{
    cache::ModelCache,
    device_use::is_cpu,
    error::{Error, Result},
    generate::ids_to_tensor,
    model::LanguageModel,
    pass::PendingTokens,
};

/// The way in which the next tokens of a text are guessed; see
/// [`GenerateOptions`](super::GenerateOptions).
#[derive(Clone, Debug, Default)]
pub enum Speculate {
    /// Not at all.
    #[default]
    Never,
    /// By [`Lookup`](Self::Lookup) on the CPU, for a cache that
    /// [takes drafts](ModelCache::takes_drafts). On a GPU not at all: there a step takes as long as
    /// its launches, which graph capture saves.
    Auto,
    /// By earlier occurrences of the last tokens in the text (prompt lookup, Saxena, 2023,
    /// <https://github.com/apoorvumang/prompt-lookup-decoding>). Tokens are guessed only while the
    /// share of right guesses after as many equal tokens makes them pay.
    Lookup,
    /// By lookup, and where that guesses nothing, by a smaller model.
    Model(DraftModel),
}

impl Speculate {
    /// Checks that `cache` takes drafts, if guesses are asked for.
    ///
    /// # Errors
    /// Fails if it does not.
    pub(super) fn check(&self, cache: &ModelCache) -> Result<()> {
        if self.is_forced() && !cache.takes_drafts() {
            let rule = "the model has layers with a recurrent state or compressed entries, which \
                        take no drafts; use never";
            return Err(Error::argument("speculate", self, rule));
        }
        Ok(())
    }

    /// Returns what guesses the tokens after `text` in a sequence of `cache`, if anything does.
    ///
    /// # Errors
    /// Fails for a draft model whose cache cannot be allocated.
    pub(super) fn drafter(
        &self,
        cache: &ModelCache,
        text: &[u32],
        device: &Device,
    ) -> Result<Option<Box<dyn Drafter>>> {
        Ok(match self {
            Self::Never => None,
            Self::Auto if !(is_cpu(device) && cache.takes_drafts()) => None,
            Self::Auto | Self::Lookup => Some(Box::new(Lookup::new(text))),
            Self::Model(model) => Some(Box::new(ModelDrafter::new(model, cache, text, device)?)),
        })
    }

    /// Returns whether guesses are asked for, wherever they may pay.
    pub(super) fn is_forced(&self) -> bool {
        matches!(self, Self::Lookup | Self::Model(_))
    }
}

/// The guesses of a text so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Guesses {
    /// Guesses that a pass verified.
    pub verified: usize,
    /// Guesses that were right. Each saved a step.
    pub right: usize,
}

/// The most guesses of a pass, of all its texts.
pub(super) const MOST_GUESSES: usize = 15;

/// Decode steps of one sequence with guesses.
#[derive(Debug)]
pub(super) struct Drafting<'a> {
    cache: &'a mut ModelCache,
    drafter: Box<dyn Drafter>,
    verified: Option<Verified>,
    guesses: Guesses,
}

/// A pass over the last token and guesses, before it is known which are right.
#[derive(Debug)]
struct Verified {
    tokens: PendingTokens,
    /// The number of tokens before them.
    len: usize,
    guesses: Vec<u32>,
    /// `[1 + guesses, vocab]`.
    logits: Tensor<2>,
    /// The guesses that were right so far.
    right: usize,
}

impl Verified {
    /// Returns the logits after the last right guess, `[1, vocab]`.
    fn next(&self) -> Tensor<2> {
        self.logits.clone().narrow(0, self.right, 1)
    }
}

impl<'a> Drafting<'a> {
    /// Returns decode steps with guesses after `text`, or the cache if there are to be none.
    ///
    /// # Errors
    /// Fails for a cache that does not take drafts, or has another batch than 1, unless
    /// `speculate` leaves the choice.
    pub(super) fn new(
        speculate: &Speculate,
        cache: &'a mut ModelCache,
        text: &[u32],
        device: &Device,
    ) -> Result<core::result::Result<Self, &'a mut ModelCache>> {
        speculate.check(cache)?;
        if cache.batch() != 1 {
            return match speculate.is_forced() {
                true => Err(Error::argument("batch", cache.batch(), "must be 1 for guesses")),
                false => Ok(Err(cache)),
            };
        }
        let Some(drafter) = speculate.drafter(cache, text, device)? else {
            return Ok(Err(cache));
        };
        Ok(Ok(Self { cache, drafter, verified: None, guesses: Guesses::default() }))
    }

    /// Returns the number of tokens of the text that need not be appended any more.
    pub(super) fn len(&self) -> usize {
        let held = |verified: &Verified| verified.len + verified.right + 1;
        self.verified.as_ref().map_or_else(|| self.cache.len(), held)
    }

    /// Returns how many tokens can still be appended.
    pub(super) fn remaining(&self) -> usize {
        self.cache.room().saturating_sub(self.len())
    }

    /// Returns the guesses so far.
    pub(super) fn guesses(&self) -> Guesses {
        self.guesses
    }

    /// Appends a token and returns the logits after it, `[1, vocab]`, which the last pass has
    /// computed if it is the next guess.
    ///
    /// # Errors
    /// Fails as a step and as the drafter do.
    pub(super) fn step(
        &mut self,
        model: &LanguageModel,
        id: u32,
        device: &Device,
    ) -> Result<Tensor<2>> {
        self.drafter.push(id);
        if let Some(verified) = &mut self.verified
            && verified.guesses.get(verified.right) == Some(&id)
        {
            verified.right += 1;
            self.guesses.right += 1;
            return Ok(verified.next());
        }
        self.finish()?;
        let most = MOST_GUESSES.min(self.remaining().saturating_sub(1));
        let guesses = self.drafter.draft(most, Pace::new(1, device))?;
        if guesses.is_empty() {
            let logits = model.step(ids_to_tensor(&[id], [1, 1], device), self.cache)?;
            return Ok(logits.squeeze_dim(1));
        }
        let ids: Vec<u32> = [id].into_iter().chain(guesses.iter().copied()).collect();
        let (n, len) = (ids.len(), self.cache.len());
        let (logits, tokens) =
            model.draft(ids_to_tensor(&ids, [1, n], device), &[n], self.cache)?;
        self.guesses.verified += guesses.len();
        let verified = Verified { tokens, len, guesses, logits, right: 0 };
        Ok(self.verified.insert(verified).next())
    }

    /// Appends the tokens of the last pass that belong to the text.
    ///
    /// # Errors
    /// Fails as [`PendingTokens::keep`] does.
    pub(super) fn finish(&mut self) -> Result<()> {
        match self.verified.take() {
            Some(Verified { tokens, right, .. }) => tokens.keep(self.cache, &[right + 1]),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Speculate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Never => "never",
            Self::Auto => "auto",
            Self::Lookup => "lookup",
            Self::Model(_) => "model",
        })
    }
}
