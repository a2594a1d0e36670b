//! [`App`]: the parts that requests share.

use std::{sync::Arc, time::Duration};

use axum::http::StatusCode;
use kv_models::{ChatTemplate, Tokenizer};

use super::{error::ApiError, gates::Gates};
use crate::{constraint::Constraints, engine::Engine, metrics::Metrics};

/// The limits of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The key that requests must have in `Authorization: Bearer`; `None` asks for none.
    pub api_key: Option<String>,
    /// The largest body of a request, in bytes.
    pub max_body: usize,
    /// The longest time from a request to the end of its texts.
    pub timeout: Duration,
    /// The most connections at a time.
    pub connections: usize,
    /// The longest time in which a client takes nothing of an answer that waits for it.
    pub write_timeout: Duration,
    /// Set if the server listens on a loopback address. Requests must then name it by an address or
    /// as `localhost`, so that no other name can be made to point to it.
    pub is_local: bool,
}

impl Default for ServerOptions {
    /// Returns no key, bodies of up to 8 MiB, 10 minutes, 1024 connections, 60 s for writes, and
    /// any name.
    fn default() -> Self {
        Self {
            api_key: None,
            max_body: 8 << 20,
            timeout: Duration::from_secs(600),
            connections: 1024,
            write_timeout: Duration::from_secs(60),
            is_local: false,
        }
    }
}

/// The parts of the server that requests share.
#[derive(Debug)]
pub struct App {
    /// The name of the model.
    pub name: String,
    /// The name of the cache.
    pub cache: String,
    /// The tokenizer of the model.
    pub tokenizer: Tokenizer,
    /// The chat template of the model, if it has one.
    pub template: Option<ChatTemplate>,
    /// The size of the model's vocabulary.
    pub n_ids: usize,
    /// Compiles constraints for the tokenizer, or the reason why it cannot.
    pub constraints: Result<Constraints, String>,
    /// The thread that owns the model.
    pub engine: Engine,
    /// The metrics of the engine.
    pub metrics: Metrics,
    /// The limits of the server.
    pub options: ServerOptions,
    /// The limits for requests that are not texts yet.
    pub gates: Gates,
}

impl App {
    /// Runs work that takes long, such as encoding a large text, beside other requests.
    pub(super) async fn blocking<R: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<R, ApiError> + Send + 'static,
    ) -> Result<R, ApiError> {
        let app = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&app)).await;
        done.unwrap_or_else(|_| Err(ApiError::internal("the request could not be read")))
    }

    /// Checks the model that a request names.
    pub(super) fn check_model(&self, model: Option<&str>) -> Result<(), ApiError> {
        match model {
            Some(model) if model != self.name => {
                let rule = format!("this server has the model {}", self.name);
                let error = ApiError::field("model", model, rule).with_code("model_not_found");
                Err(error.with_status(StatusCode::NOT_FOUND))
            }
            _ => Ok(()),
        }
    }

    /// Returns the text of a single token. Incomplete characters become U+FFFD.
    pub(super) fn token_text(&self, id: u32) -> String {
        let text = self.tokenizer.decode(&[id]).unwrap_or_default();
        // Decoders of SentencePiece remove the space at the start of a text.
        let spaced =
            self.tokenizer.id_to_token(id).is_some_and(|token| token.starts_with('\u{2581}'));
        if spaced && !text.starts_with(' ') { format!(" {text}") } else { text }
    }
}
