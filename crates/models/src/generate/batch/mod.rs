//! [`Batch`]: continuous batching of several texts.

mod decode;
mod prefill;
mod text;

use std::{
    collections::{BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use burn::tensor::Device;

pub use self::text::{BatchText, BatchTotals, Event};
use self::text::{Reading, Text};
use super::{GenerateOptions, Guesses, Stop, picker::Picker};
use crate::{
    cache::{ModelCache, PrefixCache},
    error::{Error, Result},
    model::LanguageModel,
};

/// Continues several texts at once, one in each slot of the cache. Prompts are prefilled one after
/// the other into free slots, a chunk between two decode steps. All texts in slots take decode
/// steps together, and a text that ends frees its slot for the next.
///
/// Each text has its own random stream, so its tokens do not depend on the others. Text `i` gets
/// the tokens of a single text whose seed is greater by `i`.
///
/// ```no_run
/// # fn main() -> kv_models::Result<()> {
/// # use kv_models::{Batch, generate::Event, kv_cubecl::KvCacheConfig};
/// # let device = burn::tensor::Device::default();
/// # let model = kv_models::load("model.gguf", &device)?.model;
/// let mut cache = model.new_cache("k4v4".parse::<KvCacheConfig>()?, 8, &device)?;
/// let mut batch = Batch::new(&model, &mut cache, Default::default(), &device)?;
/// for prompt in [vec![1, 2, 3], vec![4, 5]] {
///     batch.push(&prompt)?;
/// }
/// while let Some(event) = batch.next_event()? {
///     match event {
///         Event::Token { text, id } => println!("{text} goes on with {id}"),
///         Event::End { text, generated } => println!("{text} ends by {}", generated.stop),
///         Event::Failed { text, error } => println!("{text}: {error}"),
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Batch<'a> {
    model: &'a LanguageModel,
    cache: &'a mut ModelCache,
    device: &'a Device,
    options: GenerateOptions,
    /// A cache of one sequence, in which prompts are prefilled.
    reader: ModelCache,
    /// The text whose prompt is being prefilled.
    reading: Option<Reading>,
    /// Prefixes of prompts, which are not computed again.
    prefixes: Option<PrefixCache>,
    waiting: VecDeque<Text>,
    /// The text in each slot of the cache.
    slots: Vec<Option<Text>>,
    events: VecDeque<Event>,
    /// The number of texts so far, which is the number of the next text.
    n_texts: usize,
    totals: BatchTotals,
    /// The number of decode steps so far.
    steps: usize,
    /// True if the texts in slots have not got a decode step since a prompt was read.
    owes_step: bool,
}

impl<'a> Batch<'a> {
    /// Creates a batch without texts; `options` apply to each text without settings of its own.
    ///
    /// # Errors
    /// Fails for a cache that holds tokens, for invalid sampling options, for graph capture, and
    /// where the options ask for guesses that the cache does not take.
    pub fn new(
        model: &'a LanguageModel,
        cache: &'a mut ModelCache,
        options: GenerateOptions,
        device: &'a Device,
    ) -> Result<Self> {
        Picker::new(options.sampling, device)?;
        if options.prefill_chunk == 0 {
            return Err(Error::argument("prefill_chunk", 0, "must be at least 1"));
        }
        if options.graph_capture == Some(true) {
            let rule = "sequences of different lengths do not support graph capture";
            return Err(Error::argument("graph_capture", true, rule));
        }
        if !cache.is_empty() {
            let held = format!("{:?} tokens", cache.lens());
            return Err(Error::argument("cache", held, "must be empty for a new batch"));
        }
        options.speculate.check(cache)?;
        let reader = cache.select(&[0])?;
        let slots = (0..cache.batch()).map(|_| None).collect();
        let (waiting, events, totals) = Default::default();
        let (n_texts, steps) = (0, 0);
        Ok(Self {
            model,
            cache,
            device,
            options,
            reader,
            reading: None,
            prefixes: None,
            waiting,
            slots,
            events,
            n_texts,
            totals,
            steps,
            owes_step: false,
        })
    }

    /// Returns the same batch with a store of prefixes for the prompts of texts with a
    /// [salt](BatchText::salt). A chunk of a prefill then has the tokens of a block, so a prompt
    /// gives the same logits with and without a stored prefix.
    ///
    /// # Errors
    /// Fails for a store that was made for another cache.
    pub fn with_prefixes(mut self, prefixes: PrefixCache) -> Result<Self> {
        prefixes.check(&self.reader)?;
        self.options.prefill_chunk = prefixes.block_tokens();
        self.prefixes = Some(prefixes);
        Ok(self)
    }

    /// Returns the store of prefixes, if there is one.
    pub fn prefixes(&self) -> Option<&PrefixCache> {
        self.prefixes.as_ref()
    }

    /// Ends the batch, and returns the store of prefixes.
    pub fn into_prefixes(self) -> Option<PrefixCache> {
        self.prefixes
    }

    /// Adds a text, which starts as soon as a slot is free. Returns its number.
    ///
    /// # Errors
    /// Fails for an empty prompt, for one that exceeds the cache or the model, and where the
    /// options ask for guesses but the device picks the tokens.
    pub fn push(&mut self, prompt: &[u32]) -> Result<usize> {
        let seed = self.options.sampling.seed.wrapping_add(self.n_texts as u64);
        let picker = Picker::new(super::Sampling { seed, ..self.options.sampling }, self.device)?;
        if let (Picker::Device(_), true) = (&picker, self.options.speculate.is_forced()) {
            let rule =
                "the device picks the tokens of a batch, so guesses cannot follow; use never";
            return Err(Error::argument("speculate", &self.options.speculate, rule));
        }
        let (max_tokens, eos) = (self.options.max_tokens, self.options.eos.clone());
        self.add(prompt.to_vec(), max_tokens, eos, None, picker)
    }

    /// Adds a text with settings of its own, which starts as soon as a slot is free. Returns its
    /// number. The host reads the logits of its steps.
    ///
    /// # Errors
    /// Fails as [`push`](Self::push) does.
    pub fn push_text(&mut self, text: BatchText) -> Result<usize> {
        let BatchText { prompt, max_tokens, eos, salt, pick } = text;
        let salt = salt.filter(|_| !pick.scores_prompt());
        self.add(prompt, max_tokens, eos, salt, Picker::Host(pick))
    }

    fn add(
        &mut self,
        ids: Vec<u32>,
        max_tokens: usize,
        eos: BTreeSet<u32>,
        salt: Option<String>,
        picker: Picker,
    ) -> Result<usize> {
        let n_prompt = ids.len();
        self.cache.check_after(0, n_prompt)?;
        let number = self.n_texts;
        let text = Text {
            number,
            max_tokens,
            eos,
            salt,
            picker,
            drafter: None,
            ids,
            n_prompt,
            prefix_tokens: 0,
            prefill_time: Duration::ZERO,
            first_token_time: Duration::ZERO,
            start: Instant::now(),
            decode_tokens: 0,
            guesses: Guesses::default(),
        };
        self.waiting.push_back(text);
        self.n_texts += 1;
        Ok(number)
    }

    /// Returns the next event; `None` when all texts have ended.
    ///
    /// # Errors
    /// Fails as [`advance`](Self::advance) does.
    pub fn next_event(&mut self) -> Result<Option<Event>> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            if !self.advance()? {
                return Ok(None);
            }
        }
    }

    /// Returns the next event that has already happened.
    pub fn pop_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Prefills one chunk of a prompt. Unless the prompt is complete, then takes one decode step
    /// with all texts in slots; after a complete prompt, the next call takes the step first.
    /// Returns whether there was anything to do.
    ///
    /// # Errors
    /// Fails for logits that cannot be read, on a GPU for any that are not finite, and for a prefix
    /// that cannot be copied from or to the device.
    pub fn advance(&mut self) -> Result<bool> {
        let is_occupied = |slots: &[Option<Text>]| slots.iter().any(Option::is_some);
        // Prompts that end at once follow each other, and must not stop the other texts.
        if self.owes_step && self.events.is_empty() && is_occupied(&self.slots) {
            self.owes_step = false;
            self.step()?;
            return Ok(true);
        }
        if self.reading.is_none()
            && let Some(slot) = self.slots.iter().position(Option::is_none)
            && let Some(text) = self.waiting.pop_front()
        {
            self.reading = Some(self.start(slot, text)?);
        }
        let reads = self.reading.is_some();
        if let Some(reading) = self.reading.take() {
            self.reading = self.read_chunk(reading)?;
        }
        // The caller may stop a text at its first token.
        let steps = self.events.is_empty() && is_occupied(&self.slots);
        if steps {
            self.step()?;
        }
        self.owes_step = !steps;
        Ok(reads || steps)
    }

    /// Returns the number of texts that wait for a slot.
    pub fn n_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the number of texts that are prefilled or continued.
    pub fn n_active(&self) -> usize {
        self.slots.iter().flatten().count() + usize::from(self.reading.is_some())
    }

    /// Ends a text with [`Stop::Callback`], whether it waits or is being continued, after the last
    /// token that the caller has got. Returns whether there was such a text.
    pub fn stop(&mut self, text: usize) -> bool {
        let before = self.events.len();
        self.events.retain(|event| !matches!(event, Event::Token { text: it, .. } if *it == text));
        let unread = before - self.events.len();
        if let Some(mut ended) = self.take_out(text) {
            ended.ids.truncate(ended.ids.len() - unread);
            // The first token of a text comes from its prefill.
            let dropped = unread.min(ended.decode_tokens);
            ended.decode_tokens -= dropped;
            self.totals.decode_tokens -= dropped;
            self.events.push_back(ended.end(Stop::Callback));
            return true;
        }
        // It has ended, but the caller does not know yet.
        for event in &mut self.events {
            if let Event::End { text: it, generated } = event
                && *it == text
                && (unread > 0 || generated.stop == Stop::Eos)
            {
                let dropped = unread + usize::from(generated.stop == Stop::Eos);
                generated.ids.truncate(generated.ids.len() - dropped);
                let dropped = dropped.min(generated.decode_tokens);
                generated.decode_tokens -= dropped;
                self.totals.decode_tokens -= dropped;
                generated.stop = Stop::Callback;
                return true;
            }
        }
        false
    }

    /// Removes a text from where it is, and frees its slot.
    fn take_out(&mut self, number: usize) -> Option<Text> {
        let is_it = |text: &Text| text.number == number;
        if let Some(index) = self.waiting.iter().position(is_it) {
            return self.waiting.remove(index);
        }
        if let Some(reading) = self.reading.take_if(|reading| is_it(&reading.text)) {
            return Some(reading.text);
        }
        let slot = self.slots.iter().position(|slot| slot.as_ref().is_some_and(is_it))?;
        // The slot holds at least the prompt.
        self.cache.remove(slot).ok()?;
        self.slots[slot].take()
    }

    /// Returns the statistics of all texts so far.
    pub fn totals(&self) -> BatchTotals {
        self.totals
    }
}
