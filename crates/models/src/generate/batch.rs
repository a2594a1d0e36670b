//! Several texts continued together.

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
use crate::{Error, LanguageModel, ModelCache, Result, spans::PHASE};

/// Texts that are continued together, as many at a time as the cache has slots: prompts are read one
/// after the other into free slots, all that are read take each step together, and a text that ends makes
/// room for the next.
///
/// Each text has a random stream of its own, so that what is drawn for it does not depend on the others;
/// text `i` draws as one alone does whose seed is greater by `i`.
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
    /// Of one sequence: where prompts are read, by chunks.
    reader: ModelCache,
    waiting: VecDeque<Text>,
    /// The text in each slot of the cache.
    slots: Vec<Option<Text>>,
    events: VecDeque<Event>,
    /// Texts so far, which number the next.
    n_texts: usize,
    totals: BatchTotals,
    /// Steps so far.
    steps: usize,
}

/// What happens to a text. Texts are numbered from 0, in the order in which they came.
#[derive(Clone, Debug)]
pub enum Event {
    /// A token was generated. An end-of-text id is none.
    Token {
        /// The text.
        text: usize,
        /// The token.
        id: u32,
    },
    /// The text has ended, and its slot is free.
    End {
        /// The text.
        text: usize,
        /// What became of it. Its times are those in which the other texts went on, too.
        generated: Generated,
    },
}

/// What a [`Batch`] has done for all of its texts.
#[derive(Clone, Copy, Debug, Default)]
pub struct BatchTotals {
    /// Prompt tokens.
    pub prefill_tokens: usize,
    /// Time to read the prompts.
    pub prefill_time: Duration,
    /// Tokens of all texts that were passed through the model one at a time.
    pub decode_tokens: usize,
    /// Time for that, sampling included.
    pub decode_time: Duration,
}

impl BatchTotals {
    /// Prompt tokens per second.
    pub fn prefill_tokens_per_second(&self) -> f64 {
        per_second(self.prefill_tokens, self.prefill_time)
    }

    /// Decoded tokens per second, of all texts together.
    pub fn decode_tokens_per_second(&self) -> f64 {
        per_second(self.decode_tokens, self.decode_time)
    }
}

/// Zero for nothing.
fn per_second(n: usize, time: Duration) -> f64 {
    if n == 0 { 0.0 } else { n as f64 / time.as_secs_f64() }
}

/// A text that waits or is continued.
#[derive(Debug)]
struct Text {
    number: usize,
    picker: Picker,
    /// The prompt, then what was generated.
    ids: Vec<u32>,
    n_prompt: usize,
    prefill_time: Duration,
    first_token_time: Duration,
    /// When the prompt was read.
    start: Instant,
    decode_tokens: usize,
}

impl Text {
    /// Takes the next token, where `remaining` more have room; why the text ends, if it does.
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
    /// No texts yet; `options` are those of each.
    ///
    /// # Errors
    ///
    /// A cache that holds tokens, invalid sampling options, or steps that are to be recorded.
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
        if options.recorded == Some(true) {
            let rule = "steps of sequences of different lengths cannot be recorded";
            return Err(Error::argument("recorded", true, rule));
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

    /// Adds a text, which starts as soon as there is a slot; at any time. Returns its number.
    ///
    /// # Errors
    ///
    /// An empty prompt, or one that exceeds the cache or the model.
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

    /// The next token or end of a text; `None` when all texts have ended.
    ///
    /// # Errors
    ///
    /// Logits that are not finite.
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

    /// Ends a text that waits or is continued, by [`Stop::Callback`]. Whether there was one of that number.
    pub fn stop(&mut self, text: usize) -> bool {
        let waiting = self.waiting.iter().position(|waiting| waiting.number == text);
        let ended = match waiting.and_then(|index| self.waiting.remove(index)) {
            Some(text) => Some(text),
            None => {
                let is_it = |slot: &Option<Text>| slot.as_ref().is_some_and(|t| t.number == text);
                let slot = self.slots.iter().position(is_it);
                slot.and_then(|slot| {
                    // Its slot holds at least its prompt.
                    self.cache.remove(slot).ok()?;
                    self.slots[slot].take()
                })
            }
        };
        let stopped = ended.is_some();
        self.events.extend(ended.map(|text| text.end(Stop::Callback)));
        stopped
    }

    /// What was done so far.
    pub fn totals(&self) -> BatchTotals {
        self.totals
    }

    /// Reads the prompt of a text and, unless the text ends with its first token, gives it the slot.
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

    /// Appends to each text the token that was picked last, and picks the next.
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
