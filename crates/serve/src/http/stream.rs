//! What all responses have around their choices, and responses as server-sent events.

use std::{
    convert::Infallible,
    sync::Arc,
    time::{Duration, SystemTime},
};

use axum::response::{
    IntoResponse, Response, Sse,
    sse::{Event, KeepAlive},
};
use serde_json::{Value, json};
use tokio::{
    sync::mpsc::{Sender, channel},
    task::block_in_place,
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;

use super::{
    app::App,
    params::StreamOptions,
    reply::{Finish, Piece, Pieces},
};

/// The tokens of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Usage {
    prompt: usize,
    completion: usize,
    /// The tokens of prompts that stored prefixes had.
    cached: usize,
    /// The number of choices for each prompt.
    n: usize,
}

impl Usage {
    /// Counts the tokens of prompts, which have `n` choices each.
    pub(super) fn new(prompt: usize, n: usize) -> Self {
        Self { prompt, completion: 0, cached: 0, n }
    }

    /// Counts the tokens of a piece.
    pub(super) fn add(&mut self, piece: &Piece) {
        self.completion += piece.n_tokens;
        // A prompt counts once, so its stored prefix does, too.
        if piece.index.is_multiple_of(self.n) {
            self.cached += piece.prefix_tokens;
        }
    }

    fn json(self) -> Value {
        let Self { prompt, completion, cached, .. } = self;
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        })
    }
}

/// The fields around the choices of a response.
#[derive(Clone, Debug)]
pub(super) struct Envelope {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
}

impl Envelope {
    pub(super) fn new(app: &App, prefix: &str, object: &'static str) -> Self {
        let id = format!("{prefix}-{:032x}", rand::random::<u128>());
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let created = since.map_or(0, |since| since.as_secs());
        Self { id, object, created, model: app.name.clone() }
    }

    pub(super) fn with(&self, choices: Vec<Value>, usage: Option<Usage>) -> Value {
        let Self { id, object, created, model } = self;
        let mut all = json!({
            "id": id, "object": object, "created": created, "model": model, "choices": choices,
        });
        if let Some(usage) = usage {
            all["usage"] = usage.json();
        }
        all
    }
}

/// The events that wait for a slow client.
const AHEAD: usize = 16;
/// The most tokens whose log-probabilities are rendered beside other requests. More, such as a
/// whole prompt's, would delay the requests on the same thread.
const RENDERED: usize = 16;

/// Returns a response that sends an event for each of the choices that `render` makes of a piece.
/// When the client goes away, the texts end.
pub(super) fn respond(
    app: Arc<App>,
    envelope: Envelope,
    mut pieces: Pieces,
    mut usage: Usage,
    options: StreamOptions,
    mut render: impl FnMut(&App, &Piece) -> Vec<Value> + Send + 'static,
) -> Response {
    let (to, events) = channel(AHEAD);
    let send = async move {
        let limit = app.options.write_timeout;
        while let Some(piece) = pieces.next().await {
            usage.add(&piece);
            if let Some(Finish::Failed(error)) = &piece.finish {
                deliver(&to, error.json().to_string(), limit).await;
                return;
            }
            // An incomplete character is held back.
            if piece.text.is_empty() && piece.tokens.is_empty() && piece.finish.is_none() {
                continue;
            }
            let choices = match piece.tokens.len() > RENDERED {
                true => block_in_place(|| render(&app, &piece)),
                false => render(&app, &piece),
            };
            for choice in choices {
                let data = envelope.with(vec![choice], None).to_string();
                if !deliver(&to, data, limit).await {
                    return;
                }
            }
        }
        if options.include_usage {
            let data = envelope.with(vec![], Some(usage)).to_string();
            deliver(&to, data, limit).await;
        }
        deliver(&to, "[DONE]".into(), limit).await;
    };
    tokio::spawn(send);
    Sse::new(ReceiverStream::new(events)).keep_alive(KeepAlive::default()).into_response()
}

/// Sends an event. Returns `false` if the client has gone, or takes no more events.
async fn deliver(to: &Sender<Result<Event, Infallible>>, data: String, limit: Duration) -> bool {
    let sent = timeout(limit, to.send(Ok(Event::default().data(data)))).await;
    sent.is_ok_and(|sent| sent.is_ok())
}
