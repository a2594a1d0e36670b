//! `/v1/chat/completions`: answers conversations.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use kv_models::generate::StopStrings;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::task::block_in_place;

use super::{
    app::App,
    body::Body,
    error::ApiError,
    format::{self, constraint},
    gates::Turn,
    json::Json,
    params::{Params, check_logprobs, or_default, refuse},
    reply::{Collected, Finish, Piece, Pieces},
    stream::{self, Envelope, Usage},
};
use crate::{
    engine::{PickOptions, Scored, Task},
    tools::ToolCalls,
};

type Map = serde_json::Map<String, Value>;

#[derive(Debug, Deserialize)]
pub(super) struct Request {
    pub(super) messages: Vec<Value>,
    max_completion_tokens: Option<usize>,
    #[serde(default, deserialize_with = "or_default")]
    logprobs: bool,
    top_logprobs: Option<usize>,
    tools: Option<Value>,
    tool_choice: Option<Value>,
    #[serde(flatten)]
    params: Params,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// Returns the messages as a template reads them: with a role, content that is a string, and
/// arguments of tool calls that are objects.
fn messages(given: &[Value]) -> Result<Vec<Value>, ApiError> {
    if given.is_empty() {
        return Err(ApiError::field("messages", "[]", "must have at least one message"));
    }
    let message = |(i, given): (usize, &Value)| {
        let name = |field: &str| format!("messages[{i}].{field}");
        let mut message = given.as_object().cloned().ok_or_else(|| {
            ApiError::field(&format!("messages[{i}]"), given, "must be an object")
        })?;
        if !message.get("role").is_some_and(Value::is_string) {
            let role = message.get("role").map_or("missing".into(), Value::to_string);
            return Err(ApiError::field(&name("role"), role, "must be a string"));
        }
        let content = match message.get("content") {
            Some(Value::String(text)) => text.clone(),
            // A message that only calls tools has no content.
            None | Some(Value::Null) => String::new(),
            Some(Value::Array(parts)) => {
                let mut text = String::new();
                for part in parts {
                    match (part.get("type").and_then(Value::as_str), part.get("text")) {
                        (Some("text"), Some(Value::String(part))) => text += part,
                        _ => {
                            let rule = "must be parts of type text; this server reads no others";
                            return Err(ApiError::field(&name("content"), part, rule));
                        }
                    }
                }
                text
            }
            Some(other) => {
                let rule = "must be a string or a list of parts";
                return Err(ApiError::field(&name("content"), other, rule));
            }
        };
        message.insert("content".into(), content.into());
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        for call in calls.into_iter().flatten() {
            // Templates write the arguments as JSON, so a string would be encoded twice.
            if let Some(arguments) = call.pointer_mut("/function/arguments")
                && let Some(Ok(object)) = arguments.as_str().map(serde_json::from_str::<Map>)
            {
                *arguments = object.into();
            }
        }
        Ok(Value::Object(message))
    };
    given.iter().enumerate().map(message).collect()
}

impl App {
    /// Renders a conversation and returns its first ids, at most `limit`.
    pub(super) fn encode_chat(
        &self,
        given: &[Value],
        tools: Option<&Value>,
        limit: usize,
    ) -> Result<Vec<u32>, ApiError> {
        let messages = messages(given)?;
        let template = self.template.as_ref().ok_or_else(|| {
            ApiError::bad("messages: the model has no chat template; use /v1/completions")
        })?;
        Ok(self.tokenizer.encode_first(&template.render_json(&messages, tools)?, limit)?)
    }
}

/// A checked request.
struct Prepared {
    tasks: Vec<Task>,
    stops: StopStrings,
    usage: Usage,
    /// The number of likely tokens at each position, if log-probabilities were requested.
    top: Option<usize>,
    /// Set if the answer may call tools.
    reads_calls: bool,
}

impl Request {
    fn prepare(&self, app: &App, turn: Turn) -> Result<Prepared, ApiError> {
        let unsupported = ["functions", "function_call", "audio", "modalities", "echo"];
        refuse(&self.others, &unsupported)?;
        let n = self.params.check(app, 1)?;
        let top = match (self.logprobs, self.top_logprobs) {
            (false, Some(n)) => {
                return Err(ApiError::field("top_logprobs", n, "needs logprobs = true"));
            }
            (false, None) => None,
            (true, n) => Some(check_logprobs("top_logprobs", n.unwrap_or(0))?),
        };
        let tools = format::tools(app, self.tools.as_ref(), self.tool_choice.as_ref())?;
        let constraint = match (constraint(app, &self.others)?, tools.constraint) {
            (Some(_), Some(_)) => {
                let rule = "cannot be used with a tool_choice that needs a call";
                return Err(ApiError::field("response_format", "given", rule));
            }
            (format, call) => format.or(call),
        };
        self.params.check_constraint(constraint.as_ref())?;
        let shown = self.tools.as_ref().filter(|_| tools.are_read);
        // One id more than fits shows that a conversation is too long.
        let prompt = app.encode_chat(&self.messages, shown, app.engine.room() + 1)?;
        let change =
            |pick: PickOptions| PickOptions { top, constraint: constraint.clone(), ..pick };
        let max_tokens = self.max_completion_tokens.or(self.params.max_tokens);
        let tasks = self.params.tasks(app, &prompt, n, max_tokens, turn.deadline, change)?;
        let usage = Usage::new(prompt.len(), n);
        let stops = self.params.stops()?;
        Ok(Prepared { tasks, stops, usage, top, reads_calls: tools.are_read })
    }
}

pub(super) async fn chat(
    State(app): State<Arc<App>>,
    Body(request, turn): Body<Request>,
) -> Result<Response, ApiError> {
    let (prepared, params) = app
        .blocking(move |app| request.prepare(app, turn).map(|prepared| (prepared, request.params)))
        .await?;
    let Prepared { tasks, stops, mut usage, top, reads_calls } = prepared;
    let n = tasks.len();
    let pieces = Pieces::new(&app, tasks, &stops)?;
    if params.stream {
        let envelope = Envelope::new(&app, "chatcmpl", "chat.completion.chunk");
        let mut begun = vec![false; n];
        let mut calls = vec![reads_calls.then(ToolCalls::default); n];
        let render = move |app: &App, piece: &Piece| {
            let chunk = |delta: Value, logprobs: Option<Value>, finish: Option<&str>| {
                json!({
                    "index": piece.index, "delta": delta, "logprobs": logprobs,
                    "finish_reason": finish,
                })
            };
            let mut chunks = vec![];
            if !std::mem::replace(&mut begun[piece.index], true) {
                chunks.push(chunk(json!({"role": "assistant", "content": ""}), None, None));
            }
            let reader = &mut calls[piece.index];
            let mut text = match reader {
                Some(reader) => reader.push(&piece.text),
                None => piece.text.clone(),
            };
            let ended = reader.take_if(|_| piece.finish.is_some()).map(ToolCalls::finish);
            let called = ended.map_or(vec![], |(rest, called)| {
                text += &rest;
                called
            });
            if !text.is_empty() || top.is_some() && !piece.tokens.is_empty() {
                let logprobs = top.map(|_| logprobs(app, &piece.tokens));
                chunks.push(chunk(json!({"content": text}), logprobs, None));
            }
            if let Some(finish) = &piece.finish {
                let reason = reason(finish, !called.is_empty());
                if !called.is_empty() {
                    chunks.push(chunk(json!({"tool_calls": called}), None, None));
                }
                chunks.push(chunk(json!({}), None, Some(reason)));
            }
            chunks
        };
        let options = params.stream_options.unwrap_or_default();
        return Ok(stream::respond(app, envelope, pieces, usage, options, render));
    }
    let choices = pieces.collect(|piece| usage.add(piece)).await?;
    let choice = |(index, choice): (usize, Collected)| {
        let mut message = json!({"role": "assistant", "content": choice.text, "refusal": null});
        let mut has_called = false;
        if reads_calls {
            let mut reader = ToolCalls::default();
            let text = reader.push(&choice.text);
            let (rest, called) = reader.finish();
            if !called.is_empty() {
                let text = text + &rest;
                message["content"] = (!text.trim().is_empty()).then_some(text).into();
                message["tool_calls"] = called.into();
                has_called = true;
            }
        }
        json!({
            "index": index,
            "message": message,
            "logprobs": top.map(|_| logprobs(&app, &choice.tokens)),
            "finish_reason": choice.finish.as_ref().map(|finish| reason(finish, has_called)),
        })
    };
    let choices = choices.into_iter().enumerate();
    // Log-probabilities of long texts take long to render.
    let choices: Vec<Value> = block_in_place(|| choices.map(choice).collect());
    let envelope = Envelope::new(&app, "chatcmpl", "chat.completion");
    Ok(Json(envelope.with(choices, Some(usage))).into_response())
}

/// Returns the reason why an answer ended. An answer that was cut has maybe not made all its calls.
fn reason(finish: &Finish, has_called: bool) -> &'static str {
    match finish {
        Finish::Stop if has_called => "tool_calls",
        finish => finish.name(),
    }
}

/// Returns the log-probabilities of tokens, an object for each.
fn logprobs(app: &App, tokens: &[Scored]) -> Value {
    let one = |id: u32, logprob: f32| {
        let bytes = app.tokenizer.token_bytes(id);
        json!({"token": app.token_text(id), "logprob": logprob, "bytes": bytes})
    };
    let content: Vec<Value> = tokens
        .iter()
        .map(|token| {
            let mut all = one(token.id, token.logprob.unwrap_or_default());
            let top: Vec<Value> = token.top.iter().map(|&(id, logprob)| one(id, logprob)).collect();
            all["top_logprobs"] = top.into();
            all
        })
        .collect();
    json!({"content": content, "refusal": null})
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use super::*;

    #[test]
    fn arguments_of_earlier_calls_are_objects() {
        let arguments = |given: Value| {
            let call = json!({"type": "function", "function": {"name": "f", "arguments": given}});
            let message = json!({"role": "assistant", "tool_calls": [call]});
            messages(&[message]).unwrap()[0]["tool_calls"][0]["function"]["arguments"].clone()
        };
        assert_eq!(arguments(json!("{\"a\": [1]}")), json!({"a": [1]}));
        assert_eq!(arguments(json!({"a": 1})), json!({"a": 1}));
        for other in [json!("[1]"), json!("no JSON"), json!(""), Value::Null] {
            assert_eq!(arguments(other.clone()), other);
        }
        for wrong in [json!(3), json!([3]), json!([{"function": 3}])] {
            let message = json!({"role": "assistant", "tool_calls": wrong});
            assert_eq!(messages(&[message]).unwrap()[0]["tool_calls"], wrong);
        }
    }

    #[test]
    fn answers_that_are_cut_end_by_their_length() {
        assert_eq!(reason(&Finish::Stop, true), "tool_calls");
        assert_eq!(reason(&Finish::Stop, false), "stop");
        assert_eq!(reason(&Finish::Length, true), "length");
    }
}
