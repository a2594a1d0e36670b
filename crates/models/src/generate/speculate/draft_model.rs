//! Guesses by a smaller model.

use std::{collections::VecDeque, iter};

use burn::tensor::Device;
use kv_cubecl::KvCacheConfig;

use super::{
    drafter::Drafter,
    lookup::Lookup,
    pace::{Pace, Share},
};
use crate::{
    cache::{Checkpoints, ModelCache, PromptCache},
    error::Result,
    generate::GenerateOptions,
    model::LanguageModel,
};

/// A model that guesses for a larger one with the same vocabulary.
#[derive(Clone, Debug)]
pub struct DraftModel {
    model: LanguageModel,
    /// The time of a step of this model, as a share of a step of the other.
    step: f32,
    /// The size of the other's vocabulary.
    vocab: usize,
}

impl DraftModel {
    /// Takes a model on the device of `target`. Both must have the same tokens, except for ids that
    /// only one has; the caller compares the tokenizers.
    pub fn new(model: LanguageModel, target: &LanguageModel) -> Self {
        // Steps take as long as it takes to read the weights.
        let step = model.weight_bytes() as f32 / target.weight_bytes().max(1) as f32;
        Self { model, step, vocab: target.vocab_size() }
    }
}

/// Tokens that are not guessed by the model, once its guesses have not paid: twice as many each
/// time, up to the second number.
const REST: [usize; 2] = [16, 64];

/// Guesses by lookup, and where that guesses nothing, the most likely tokens of a smaller model.
#[derive(Debug)]
pub(super) struct ModelDrafter {
    lookup: Lookup,
    draft: DraftModel,
    device: Device,
    cache: PromptCache,
    /// The guesses of the model for the next tokens.
    guessed: VecDeque<u32>,
    share: Share,
    /// The tokens until the model guesses again, and how many there will be the next time.
    rest: usize,
    next_rest: usize,
}

impl ModelDrafter {
    /// Creates a drafter after `text`, for a text that may fill `cache`.
    ///
    /// # Errors
    /// Fails as [`LanguageModel::new_cache`] does.
    pub(super) fn new(
        draft: &DraftModel,
        cache: &ModelCache,
        text: &[u32],
        device: &Device,
    ) -> Result<Self> {
        let model = &draft.model;
        // Guesses that were wrong are removed, for which layers with a window or a state need a
        // checkpoint at the end of the text.
        let config = KvCacheConfig::float().with_capacity(cache.room().min(model.max_positions()));
        let own = PromptCache::new(model.new_cache(config, 1, device)?, Checkpoints::Ends)?;
        Ok(Self {
            lookup: Lookup::new(text),
            draft: draft.clone(),
            device: device.clone(),
            cache: own,
            guessed: VecDeque::new(),
            share: Share::unknown(0.7),
            rest: 0,
            next_rest: REST[0],
        })
    }
}

impl Drafter for ModelDrafter {
    fn push(&mut self, id: u32) {
        self.lookup.push(id);
        self.rest = self.rest.saturating_sub(1);
        if let Some(guess) = self.guessed.pop_front() {
            self.share.add(guess == id);
            if guess != id {
                self.guessed.clear();
            }
        }
    }

    fn draft(&mut self, most: usize, pace: Pace) -> Result<Vec<u32>> {
        let found = self.lookup.draft(most, pace)?;
        let (text, model) = (&self.lookup.text, &self.draft.model);
        let fits = || text.len() + most <= model.max_positions();
        let knows = || text.iter().all(|&id| (id as usize) < model.vocab_size());
        // If even right guesses would not pay, as in a batch of many texts, the model need not run.
        let may_pay = || pace.best(iter::repeat_n(1.0, most), self.draft.step) > 0;
        if !found.is_empty() || self.rest > 0 || !may_pay() || !fits() || !knows() {
            self.guessed.clear();
            return Ok(found);
        }
        let held = self.cache.reuse(text)?;
        let options = GenerateOptions::suiting(model, &self.device);
        let chunk = options.prefill_chunk;
        if text.len() - held > chunk {
            // The other texts of a batch wait, as they do for a chunk of a prompt.
            self.cache.prefill(model, &text[..held + chunk], chunk, &self.device, || true)?;
            return Ok(vec![]);
        }
        let mut n = pace.best(iter::repeat_n(self.share.right(), most), self.draft.step);
        if n == 0 {
            // One guess says whether the text has become easier.
            (self.rest, n) = (self.next_rest, 1);
            self.next_rest = (2 * self.next_rest).min(REST[1]);
        } else {
            self.next_rest = REST[0];
        }
        let options = GenerateOptions { max_tokens: n, ..options };
        let logits = self.cache.prefill(model, text, chunk, &self.device, || true)?;
        let Some(logits) = logits else { return Ok(vec![]) };
        let mut guesses = self.cache.generate(model, logits, &options, &self.device, |_| true)?.ids;
        let known = guesses.iter().take_while(|&&id| (id as usize) < self.draft.vocab).count();
        guesses.truncate(known);
        self.guessed = guesses.iter().copied().collect();
        Ok(guesses)
    }
}
