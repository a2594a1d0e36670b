//! Errors as OpenAI's API returns them.

use axum::{
    http::{HeaderValue, StatusCode, header::RETRY_AFTER},
    response::{IntoResponse, Response},
};
use serde_json::json;

use super::json::Json;
use crate::engine::Refusal;

/// An error response.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    /// The field of the request that the error is about.
    param: Option<String>,
    code: Option<&'static str>,
}

/// The seconds after which a client may try again when all places are taken.
const RETRY_SECONDS: &str = "1";

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code: None }
    }

    /// Creates an error of a request's field: what it is, and the rule that it breaks.
    pub(crate) fn field(name: &str, value: impl ToString, rule: impl AsRef<str>) -> Self {
        let message = format!("{name} = {}: {}", short(&value.to_string()), rule.as_ref());
        Self { param: Some(name.into()), ..Self::bad(message) }
    }

    /// Creates an error of the whole request.
    pub(crate) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    pub(crate) fn status(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, "invalid_request_error", message)
    }

    pub(crate) fn with_status(self, status: StatusCode) -> Self {
        Self { status, ..self }
    }

    pub(crate) fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// Creates an error of the server.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// Creates the error of a request that takes longer than it may.
    pub(crate) fn late() -> Self {
        let message = "the deadline of the request has passed";
        Self::status(StatusCode::GATEWAY_TIMEOUT, message)
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        let Self { kind, message, param, code, .. } = self;
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Busy => {
                let message = "all slots and all places in the queue are taken; try again later";
                let status = StatusCode::TOO_MANY_REQUESTS;
                Self::new(status, "rate_limit_error", message).with_code("queue_full")
            }
            Refusal::Stopping => {
                let status = StatusCode::SERVICE_UNAVAILABLE;
                Self::new(status, "server_error", "the server is stopping")
            }
        }
    }
}

impl From<kv_models::Error> for ApiError {
    fn from(error: kv_models::Error) -> Self {
        Self::bad(error.to_string())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.json())).into_response();
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static(RETRY_SECONDS));
        }
        response
    }
}

/// Returns the start of a long value.
pub(crate) fn short(value: &str) -> String {
    const MOST: usize = 80;
    match value.char_indices().nth(MOST) {
        None => value.into(),
        Some((end, _)) => format!("{}...", &value[..end]),
    }
}
