//! Reads the body of a request.

use std::{sync::Arc, time::Duration};

use axum::{
    body::to_bytes,
    extract::{FromRequest, Request},
    http::StatusCode,
};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::{app::App, error::ApiError};

/// The longest time in which a body must arrive.
const ARRIVAL: Duration = Duration::from_secs(30);

/// The body of a request, parsed from JSON.
pub(crate) struct Body<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<Arc<App>> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let most = app.options.max_body;
        let too_large = || {
            let message = format!("the body is larger than {most} bytes, the limit of this server");
            ApiError::status(StatusCode::PAYLOAD_TOO_LARGE, message)
        };
        let length = request.headers().get("content-length").and_then(|it| it.to_str().ok());
        if length.and_then(|it| it.parse::<usize>().ok()).is_some_and(|length| length > most) {
            return Err(too_large());
        }
        let read = timeout(ARRIVAL, to_bytes(request.into_body(), most)).await;
        let late = || {
            let message = format!("the body did not arrive within {} s", ARRIVAL.as_secs());
            ApiError::status(StatusCode::REQUEST_TIMEOUT, message)
        };
        let bytes = read.map_err(|_| late())?.map_err(|_| too_large())?;
        let body = serde_json::from_slice(&bytes);
        body.map(Self).map_err(|error| ApiError::bad(format!("body: {error}")))
    }
}
