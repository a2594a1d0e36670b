//! Turns the updates of a text into pieces of a response.

use std::sync::Arc;

use kv_models::generate::StopStrings;
use tokio::{
    sync::mpsc::{Receiver, Sender, channel},
    time::timeout,
};

use super::{app::App, error::ApiError};
use crate::engine::{End, Scored, Task, Update, Updates};

/// A part of one choice.
#[derive(Debug)]
pub(super) struct Piece {
    /// The number of the choice.
    pub(super) index: usize,
    /// The text that follows the earlier pieces; empty while a character is incomplete.
    pub(super) text: String,
    /// The tokens of the text, if log-probabilities were requested.
    pub(super) tokens: Vec<Scored>,
    /// The number of generated tokens that the piece adds.
    pub(super) n_tokens: usize,
    /// The tokens of the prompt that a stored prefix had, in the last piece.
    pub(super) prefix_tokens: usize,
    /// Set in the last piece.
    pub(super) finish: Option<Finish>,
}

/// The reason why a choice ended.
#[derive(Clone, Debug)]
pub(super) enum Finish {
    Stop,
    Length,
    Failed(ApiError),
}

impl Finish {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Failed(_) => "error",
        }
    }
}

/// All pieces of one choice.
#[derive(Debug, Default)]
pub(super) struct Collected {
    pub(super) text: String,
    pub(super) tokens: Vec<Scored>,
    pub(super) finish: Option<Finish>,
}

/// The pieces that wait for a slow client before the text waits, too.
const AHEAD: usize = 16;
/// The ids of a prompt that decide how the first ones after it are decoded, at most.
const CONTEXT: usize = 8;

/// The pieces of all choices of a request, as they arrive.
#[derive(Debug)]
pub(super) struct Pieces {
    receiver: Receiver<Piece>,
    going: usize,
}

impl Pieces {
    /// Starts the texts of all choices, and decodes the updates of each in a task of its own. The
    /// tasks end when this is dropped, and with them the texts.
    ///
    /// # Errors
    /// Fails as [`Engine::submit`](crate::Engine::submit) does.
    pub(super) fn new(
        app: &Arc<App>,
        tasks: Vec<Task>,
        stops: &StopStrings,
    ) -> Result<Self, ApiError> {
        let (to, receiver) = channel(AHEAD);
        let going = tasks.len();
        let context =
            |task: &Task| task.prompt[task.prompt.len().saturating_sub(CONTEXT)..].to_vec();
        let contexts: Vec<Vec<u32>> = tasks.iter().map(context).collect();
        let texts = app.engine.submit(tasks)?.into_iter().zip(contexts);
        for (index, (updates, context)) in texts.enumerate() {
            let (to, app, stops) = (to.clone(), app.clone(), stops.clone());
            tokio::spawn(Choice { index, to, app, stops, context }.run(updates));
        }
        Ok(Self { receiver, going })
    }

    /// Returns the next piece; `None` after the last of all choices.
    pub(super) async fn next(&mut self) -> Option<Piece> {
        if self.going == 0 {
            return None;
        }
        let Some(piece) = self.receiver.recv().await else {
            // The task of a choice has ended without its last piece.
            self.going = 0;
            let error = ApiError::internal("a choice has ended without its last token");
            let (index, text, tokens) = (0, String::new(), vec![]);
            let finish = Some(Finish::Failed(error));
            return Some(Piece { index, text, tokens, n_tokens: 0, prefix_tokens: 0, finish });
        };
        self.going -= usize::from(piece.finish.is_some());
        Some(piece)
    }

    /// Waits for all choices. `count` gets every piece.
    pub(super) async fn collect(
        mut self,
        mut count: impl FnMut(&Piece),
    ) -> Result<Vec<Collected>, ApiError> {
        let mut choices: Vec<Collected> = vec![];
        choices.resize_with(self.going, Collected::default);
        while let Some(piece) = self.next().await {
            count(&piece);
            let choice = &mut choices[piece.index];
            choice.text += &piece.text;
            choice.tokens.extend(piece.tokens);
            if let Some(Finish::Failed(error)) = piece.finish {
                return Err(error);
            }
            choice.finish = piece.finish;
        }
        Ok(choices)
    }
}

/// Returns a token if its log-probability was requested.
fn requested(token: Scored) -> Vec<Scored> {
    if token.logprob.is_some() { vec![token] } else { vec![] }
}

struct Choice {
    index: usize,
    to: Sender<Piece>,
    app: Arc<App>,
    stops: StopStrings,
    /// The last ids of the prompt.
    context: Vec<u32>,
}

impl Choice {
    async fn run(mut self, mut updates: Updates) {
        let app = self.app.clone();
        let mut stream = app.tokenizer.stream_after(&self.context);
        loop {
            let (text, tokens, n_tokens, finish) = match updates.next().await {
                // Tokens after a stop string, which came before the engine ended the text.
                Some(Update::Token(_) | Update::Eos(_)) if self.stops.found().is_some() => continue,
                Some(Update::Prompt(scores)) => (String::new(), scores, 0, None),
                // As in vLLM, it counts as a token, and has a log-probability.
                Some(Update::Eos(token)) => (String::new(), requested(token), 1, None),
                Some(Update::Token(token)) => match stream.push(token.id) {
                    Ok(text) => {
                        let text = self.stops.push(&text);
                        if self.stops.found().is_some() {
                            updates.stop();
                        }
                        (text, requested(token), 1, None)
                    }
                    Err(error) => {
                        let error = ApiError::internal(error.to_string());
                        (String::new(), vec![], 0, Some(Finish::Failed(error)))
                    }
                },
                Some(Update::End { end, prefix_tokens }) => {
                    let mut rest = self.stops.push(&stream.finish().unwrap_or_default());
                    rest += &self.stops.finish();
                    let finish = match end {
                        _ if self.stops.found().is_some() => Finish::Stop,
                        End::Eos => Finish::Stop,
                        End::Length => Finish::Length,
                        End::Deadline => Finish::Failed(ApiError::late()),
                        End::Failed(why) => Finish::Failed(ApiError::internal(why)),
                    };
                    let index = self.index;
                    let piece = Piece {
                        index,
                        text: rest,
                        tokens: vec![],
                        n_tokens: 0,
                        prefix_tokens,
                        finish: Some(finish),
                    };
                    self.send(piece).await;
                    return;
                }
                None => {
                    let error = ApiError::internal("the engine has ended");
                    (String::new(), vec![], 0, Some(Finish::Failed(error)))
                }
            };
            let ends = finish.is_some();
            let piece =
                Piece { index: self.index, text, tokens, n_tokens, prefix_tokens: 0, finish };
            if !self.send(piece).await || ends {
                return;
            }
        }
    }

    /// Sends a piece. Returns `false` if the client has gone, or takes no more pieces.
    async fn send(&self, piece: Piece) -> bool {
        let sent = timeout(self.app.options.write_timeout, self.to.send(piece)).await;
        sent.is_ok_and(|sent| sent.is_ok())
    }
}
