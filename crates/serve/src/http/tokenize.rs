//! `/tokenize`, `/detokenize` and `/tokenizer_info`, as vLLM has them.

use std::sync::Arc;

use axum::extract::State;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{app::App, body::Body, error::ApiError, json::Json};

#[derive(Debug, Deserialize)]
pub(super) struct Tokenize {
    prompt: Option<String>,
    messages: Option<Vec<Value>>,
    tools: Option<Value>,
    add_special_tokens: Option<bool>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Detokenize {
    tokens: Vec<u32>,
}

pub(super) async fn tokenize(
    State(app): State<Arc<App>>,
    Body(request, turn): Body<Tokenize>,
) -> Result<Json, ApiError> {
    let encode = move |app: &App| {
        // Kept until the text is encoded.
        let _turn = turn;
        match (&request.prompt, &request.messages) {
            (Some(text), None) => {
                let special = request.add_special_tokens.unwrap_or(true);
                let bos = app.tokenizer.leading_bos().filter(|_| special).into_iter();
                Ok(bos.chain(app.tokenizer.encode(text)?).collect::<Vec<_>>())
            }
            (None, Some(messages)) => app.encode_chat(messages, request.tools.as_ref(), usize::MAX),
            _ => Err(ApiError::bad("body: must have either prompt or messages")),
        }
    };
    let tokens = app.blocking(encode).await?;
    let (count, room) = (tokens.len(), app.engine.room());
    Ok(Json(json!({"tokens": tokens, "count": count, "max_model_len": room})))
}

/// Returns what clients such as lm-evaluation-harness need to encode texts by this server.
pub(super) async fn info(State(app): State<Arc<App>>) -> Json {
    let (bos, eos) = app.tokenizer.template_tokens();
    let template = app.tokenizer.chat_template();
    Json(json!({"bos_token": bos, "eos_token": eos, "chat_template": template}))
}

pub(super) async fn detokenize(
    State(app): State<Arc<App>>,
    Body(request, turn): Body<Detokenize>,
) -> Result<Json, ApiError> {
    let decode = move |app: &App| {
        // Kept until the ids are decoded.
        let _turn = turn;
        if let Some(id) = request.tokens.iter().find(|&&id| id as usize >= app.n_ids) {
            return Err(ApiError::field("tokens", id, format!("ids must be below {}", app.n_ids)));
        }
        Ok(app.tokenizer.decode(&request.tokens)?)
    };
    Ok(Json(json!({"prompt": app.blocking(decode).await?})))
}
