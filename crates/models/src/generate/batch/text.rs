//! The texts of a batch, and their events.

use std::{
    collections::{BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use crate::{
    error::Error,
    generate::{
        Generated, Guesses, Stop,
        picker::{Pick, Picker},
        speculate::Drafter,
    },
};

/// An event of one text. Texts are numbered from 0 in the order of
/// [`Batch::push`](super::Batch::push).
#[derive(Debug)]
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
    /// No token could be picked for the text, for example because a logit is NaN, or its draft
    /// model has failed. Its slot is free.
    Failed {
        /// The number of the text.
        text: usize,
        /// The reason.
        error: Error,
    },
}

/// A text with settings of its own for [`Batch::push_text`](super::Batch::push_text).
#[derive(Debug)]
pub struct BatchText {
    /// The ids of the prompt.
    pub prompt: Vec<u32>,
    /// The most tokens to generate.
    pub max_tokens: usize,
    /// Ids that end the text.
    pub eos: BTreeSet<u32>,
    /// Prompts with the same salt share stored prefixes; `None` neither uses nor stores one. See
    /// [`Batch::with_prefixes`](super::Batch::with_prefixes).
    pub salt: Option<String>,
    /// Picks the tokens.
    pub pick: Box<dyn Pick>,
}

/// The statistics of all texts of a [`Batch`](super::Batch).
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

/// A prompt that is being prefilled.
#[derive(Debug)]
pub(super) struct Reading {
    pub(super) text: Text,
    /// The free slot that the text will get.
    pub(super) slot: usize,
    /// The lengths at which the prefix is stored.
    pub(super) marks: Vec<usize>,
    pub(super) start: Instant,
}

/// A text that waits or is being continued.
#[derive(Debug)]
pub(super) struct Text {
    pub(super) number: usize,
    pub(super) max_tokens: usize,
    pub(super) eos: BTreeSet<u32>,
    pub(super) salt: Option<String>,
    pub(super) picker: Picker,
    /// Guesses the next tokens, if any are to be guessed.
    pub(super) drafter: Option<Box<dyn Drafter>>,
    /// The prompt, followed by the generated ids.
    pub(super) ids: Vec<u32>,
    pub(super) n_prompt: usize,
    /// The prompt's tokens that a stored prefix had.
    pub(super) prefix_tokens: usize,
    pub(super) prefill_time: Duration,
    pub(super) first_token_time: Duration,
    /// The end of the prefill.
    pub(super) start: Instant,
    pub(super) decode_tokens: usize,
    pub(super) guesses: Guesses,
}

impl Text {
    /// Appends the next token, when `remaining` more tokens fit. Returns the reason if the text
    /// ends.
    pub(super) fn take(
        &mut self,
        id: u32,
        remaining: usize,
        events: &mut VecDeque<Event>,
    ) -> Option<Stop> {
        self.ids.push(id);
        if let Some(drafter) = &mut self.drafter {
            drafter.push(id);
        }
        if self.eos.contains(&id) {
            return Some(Stop::Eos);
        }
        events.push_back(Event::Token { text: self.number, id });
        match () {
            () if self.ids.len() - self.n_prompt == self.max_tokens => Some(Stop::MaxTokens),
            () if remaining == 0 => Some(Stop::Capacity),
            () => None,
        }
    }

    pub(super) fn end(mut self, stop: Stop) -> Event {
        let generated = Generated {
            ids: self.ids.split_off(self.n_prompt),
            stop,
            prefill_tokens: self.n_prompt,
            prefix_tokens: self.prefix_tokens,
            prefill_time: self.prefill_time,
            first_token_time: self.first_token_time,
            decode_tokens: self.decode_tokens,
            decode_time: self.start.elapsed(),
            guesses: self.guesses,
        };
        Event::End { text: self.number, generated }
    }
}
