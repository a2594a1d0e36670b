//! Responses in JSON.

use axum::{
    http::header::CONTENT_TYPE,
    response::{IntoResponse, Response},
};

/// A response with a body of JSON.
pub(crate) struct Json(pub(crate) serde_json::Value);

impl IntoResponse for Json {
    fn into_response(self) -> Response {
        ([(CONTENT_TYPE, "application/json")], self.0.to_string()).into_response()
    }
}
