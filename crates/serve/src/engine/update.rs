//! What the engine sends to requests.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use tokio::sync::mpsc::UnboundedReceiver;

/// A token with its log-probability: the logarithm of the softmax over the model's own logits,
/// before bias, penalties and temperature.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// The id of the token.
    pub id: u32,
    /// `None` for the first token of a prompt, and if log-probabilities were not requested.
    pub logprob: Option<f32>,
    /// The most likely tokens at this position, the most likely first.
    pub top: Vec<(u32, f32)>,
}

/// An event of a [`Task`](super::Task).
#[derive(Debug)]
pub enum Update {
    /// The tokens of the prompt with their log-probabilities, if they were requested.
    Prompt(Vec<Scored>),
    /// The next token.
    Token(Scored),
    /// The id that ends the text, which is not a part of it.
    Eos(Scored),
    /// The text has ended.
    End {
        /// The reason.
        end: End,
        /// The tokens of the prompt that a stored prefix had.
        prefix_tokens: usize,
    },
}

impl Update {
    pub(super) fn failed(error: &kv_models::Error) -> Self {
        Self::End { end: End::Failed(error.to_string()), prefix_tokens: 0 }
    }
}

/// The updates of a text. The text ends when this is dropped.
#[derive(Debug)]
pub struct Updates {
    pub(super) receiver: UnboundedReceiver<Update>,
    pub(super) stopped: Arc<AtomicBool>,
}

impl Updates {
    /// Returns the next update; `None` if the engine has ended.
    pub async fn next(&mut self) -> Option<Update> {
        self.receiver.recv().await
    }

    /// Ends the text as if it had generated an end-of-text id. [`Update::End`] follows, maybe after
    /// tokens that were generated in the meantime.
    pub fn stop(&self) {
        self.stopped.store(true, SeqCst);
    }
}

/// The reason why a text ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// An end-of-text id was generated, or the request [stopped](Updates::stop) the text.
    Eos,
    /// `max_tokens` were generated, or the cache is full.
    Length,
    /// The deadline has passed.
    Deadline,
    /// The text cannot be continued.
    Failed(String),
}
