//! Reads the body of a request.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    body::to_bytes,
    extract::{FromRequest, Request},
    http::StatusCode,
};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::{app::App, error::ApiError, gates::Turn};

/// The longest time in which a body must arrive.
const ARRIVAL: Duration = Duration::from_secs(30);
/// The most bytes of a body that does not wait until other bodies are read.
const SMALL: usize = 64 << 10;

/// The body of a request, parsed from JSON.
pub(crate) struct Body<T>(pub(crate) T, pub(crate) Turn);

impl<T: DeserializeOwned + Send + 'static> FromRequest<Arc<App>> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let deadline = Instant::now() + app.options.timeout;
        let most = app.options.max_body;
        let too_large = || {
            let message = format!("the body is larger than {most} bytes, the limit of this server");
            ApiError::status(StatusCode::PAYLOAD_TOO_LARGE, message)
        };
        let length = request.headers().get("content-length").and_then(|it| it.to_str().ok());
        let length = length.and_then(|it| it.parse::<usize>().ok());
        if length.is_some_and(|length| length > most) {
            return Err(too_large());
        }
        let large = match length.is_none_or(|length| length > SMALL) {
            true => Some(app.gates.large(deadline).await?),
            false => None,
        };
        let read = timeout(ARRIVAL, to_bytes(request.into_body(), most)).await;
        let late = || {
            let message = format!("the body did not arrive within {} s", ARRIVAL.as_secs());
            ApiError::status(StatusCode::REQUEST_TIMEOUT, message)
        };
        let bytes = read.map_err(|_| late())?.map_err(|_| too_large())?;
        let turn = app.gates.turn(deadline, large).await?;
        let parse = move |_: &App| match serde_json::from_slice(&bytes) {
            Ok(body) => Ok(Self(body, turn)),
            Err(error) => Err(ApiError::bad(format!("body: {error}"))),
        };
        app.blocking(parse).await
    }
}
