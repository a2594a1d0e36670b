//! [`Batch`]: continuous batching of several texts.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use burn::tensor::Device;
use tracing::trace_span;

use super::{
    GenerateOptions, Generated, Stop, finish, ids_to_tensor,
    picker::{Picker, Waiting, pick_each},
    prefill,
};
use crate::{
    cache::ModelCache,
    error::{Error, Result},
    model::LanguageModel,
    spans::PHASE,
};

/// Continues several texts at once, one in each slot of the cache. Prompts are prefilled one after
/// the other into free slots. All texts in slots take decode steps together, and a text that ends
/// frees its slot for the next.
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
    waiting: VecDeque<Text>,
    /// The text in each slot of the cache.
    slots: Vec<Option<Text>>,
    events: VecDeque<Event>,
    /// The number of texts so far, which is the number of the next text.
    n_texts: usize,
    totals: BatchTotals,
    /// The number of decode steps so far.
    steps: usize,
}

/// An event of one text. Texts are numbered from 0 in the order of [`Batch::push`].
#[derive(Clone, Debug)]
pub enum Event {
    /// A token was generated. An end-of-text id causes no event.
    Token {
        /// The number of the text.
        text: usize,
        /// The id of the token.
        id: u32,
    },
    /// The text has ended, and its slot is free.
    End {
        /// The number of the text.
        text: usize,
        /// The generated text and statistics. Times include the steps of other texts.
        generated: Generated,
    },
}

/// The statistics of all texts of a [`Batch`].
#[derive(Clone, Copy, Debug, Default)]
pub struct BatchTotals {
    /// Prompt tokens.
    pub prefill_tokens: usize,
    /// Time of all prefills.
    pub prefill_time: Duration,
    /// Tokens of all texts that were decoded one at a time.
    pub decode_tokens: usize,
    /// Time of all decode steps, including sampling.
    pub decode_time: Duration,
}

impl BatchTotals {
    /// Returns the prompt tokens per second.
    pub fn prefill_tokens_per_second(&self) -> f64 {
        per_second(self.prefill_tokens, self.prefill_time)
    }

    /// Returns the decoded tokens per second of all texts together.
    pub fn decode_tokens_per_second(&self) -> f64 {
        per_second(self.decode_tokens, self.decode_time)
    }
}

/// Returns `n / time`, and 0 for no tokens.
fn per_second(n: usize, time: Duration) -> f64 {
    if n == 0 { 0.0 } else { n as f64 / time.as_secs_f64() }
}

/// A text that waits or is being continued.
#[derive(Debug)]
struct Text {
    number: usize,
    picker: Picker,
    /// The prompt, followed by the generated ids.
    ids: Vec<u32>,
    n_prompt: usize,
    prefill_time: Duration,
    first_token_time: Duration,
    /// The end of the prefill.
    start: Instant,
    decode_tokens: usize,
}

impl Text {
    /// Appends the next token, when `remaining` more tokens fit. Returns the reason if the text
    /// ends.
    fn take(
        &mut self,
        id: u32,
        remaining: usize,
        options: &GenerateOptions,
        events: &mut VecDeque<Event>,
    ) -> Option<Stop> {
        self.ids.push(id);
        if options.eos.contains(&id) {
            return Some(Stop::Eos);
        }
        events.push_back(Event::Token { text: self.number, id });
        match () {
            () if self.ids.len() - self.n_prompt == options.max_tokens => Some(Stop::MaxTokens),
            () if remaining == 0 => Some(Stop::Capacity),
            () => None,
        }
    }

    fn end(mut self, stop: Stop) -> Event {
        let generated = Generated {
            ids: self.ids.split_off(self.n_prompt),
            stop,
            prefill_tokens: self.n_prompt,
            prefill_time: self.prefill_time,
            first_token_time: self.first_token_time,
            decode_tokens: self.decode_tokens,
            decode_time: self.start.elapsed(),
        };
        Event::End { text: self.number, generated }
    }
}

impl<'a> Batch<'a> {
    /// Creates a batch without texts; `options` apply to each text.
    ///
    /// # Errors
    /// Fails for a cache that holds tokens, for invalid sampling options, and for graph capture.
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
            waiting,
            slots,
            events,
            n_texts,
            totals,
            steps,
        })
    }

    /// Adds a text, which starts as soon as a slot is free. Returns its number.
    ///
    /// # Errors
    /// Fails for an empty prompt, and for one that exceeds the cache or the model.
    pub fn push(&mut self, prompt: &[u32]) -> Result<usize> {
        self.reader.reset();
        self.reader.check(1, prompt.len())?;
        let number = self.n_texts;
        let seed = self.options.sampling.seed.wrapping_add(number as u64);
        let picker = Picker::new(super::Sampling { seed, ..self.options.sampling }, self.device)?;
        let (ids, n_prompt) = (prompt.to_vec(), prompt.len());
        let text = Text {
            number,
            picker,
            ids,
            n_prompt,
            prefill_time: Duration::ZERO,
            first_token_time: Duration::ZERO,
            start: Instant::now(),
            decode_tokens: 0,
        };
        self.waiting.push_back(text);
        self.n_texts += 1;
        Ok(number)
    }

    /// Returns the next event; `None` when all texts have ended.
    ///
    /// # Errors
    /// Fails for logits that are not finite.
    pub fn next_event(&mut self) -> Result<Option<Event>> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            let free = self.slots.iter().position(Option::is_none);
            match free.and_then(|slot| Some((slot, self.waiting.pop_front()?))) {
                Some((slot, text)) => self.start(slot, text)?,
                None if self.slots.iter().any(Option::is_some) => self.step()?,
                None => return Ok(None),
            }
        }
    }

    /// Ends a text with [`Stop::Callback`], whether it waits or is being continued. Returns whether
    /// there was such a text.
    pub fn stop(&mut self, text: usize) -> bool {
        let waiting = self.waiting.iter().position(|waiting| waiting.number == text);
        let ended = match waiting.and_then(|index| self.waiting.remove(index)) {
            Some(text) => Some(text),
            None => {
                let is_it = |slot: &Option<Text>| slot.as_ref().is_some_and(|t| t.number == text);
                let slot = self.slots.iter().position(is_it);
                slot.and_then(|slot| {
                    // Its slot holds at least the prompt.
                    self.cache.remove(slot).ok()?;
                    self.slots[slot].take()
                })
            }
        };
        let stopped = ended.is_some();
        self.events.extend(ended.map(|text| text.end(Stop::Callback)));
        stopped
    }

    /// Returns the statistics of all texts so far.
    pub fn totals(&self) -> BatchTotals {
        self.totals
    }

    /// Prefills the prompt of a text and gives it the slot, unless the text ends with its first
    /// token.
    fn start(&mut self, slot: usize, mut text: Text) -> Result<()> {
        let start = Instant::now();
        self.reader.reset();
        let chunk = self.options.prefill_chunk;
        let logits = prefill(self.model, &mut self.reader, &text.ids, chunk, self.device)?;
        finish(self.device)?;
        text.start = Instant::now();
        text.prefill_time = text.start - start;
        self.totals.prefill_tokens += text.n_prompt;
        self.totals.prefill_time += text.prefill_time;
        let ended = match self.options.max_tokens {
            0 => Some(Stop::MaxTokens),
            _ => {
                let id = text.picker.pick(logits, &text.ids)?;
                text.first_token_time = start.elapsed();
                text.take(id, self.reader.remaining(), &self.options, &mut self.events)
            }
        };
        match ended {
            Some(stop) => self.events.push_back(text.end(stop)),
            None => {
                self.cache.admit(slot, &self.reader)?;
                self.slots[slot] = Some(text);
            }
        }
        Ok(())
    }

    /// Appends the last token of each text and picks the next.
    fn step(&mut self) -> Result<()> {
        let (start, n) = (Instant::now(), self.steps + 1);
        let _phase = trace_span!(target: PHASE, "decode", n).entered();
        self.steps = n;
        let last = |slot: &Option<Text>| slot.as_ref().and_then(|text| text.ids.last().copied());
        let ids: Vec<u32> = self.slots.iter().map(|slot| last(slot).unwrap_or(0)).collect();
        let tokens: Vec<usize> = self.slots.iter().map(|slot| slot.is_some().into()).collect();
        let ids = ids_to_tensor(&ids, [tokens.len(), 1], self.device);
        let logits = self.model.step_ragged(ids, &tokens, self.cache)?.squeeze_dim(1);
        let waiting = self.slots.iter_mut().map(|slot| {
            slot.as_mut().map(|Text { picker, ids, .. }| Waiting { picker, text: ids })
        });
        let picked = pick_each(logits, waiting.collect())?;
        let room = self.cache.room();
        for (i, (slot, id)) in self.slots.iter_mut().zip(picked).enumerate() {
            let (Some(text), Some(id)) = (slot.as_mut(), id) else { continue };
            text.decode_tokens += 1;
            self.totals.decode_tokens += 1;
            let remaining = room - self.cache.lens()[i];
            let ended = text.take(id, remaining, &self.options, &mut self.events);
            if let (Some(stop), Some(text)) = (ended, slot.take_if(|_| ended.is_some())) {
                self.cache.remove(i)?;
                self.events.push_back(text.end(stop));
            }
        }
        self.totals.decode_time += start.elapsed();
        Ok(())
    }
}
