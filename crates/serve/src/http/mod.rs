//! The HTTP side: routes, limits and the shapes of OpenAI's API.

mod app;
mod body;
mod chat;
mod completions;
mod error;
mod format;
mod gates;
mod json;
mod params;
mod reply;
mod serve;
mod stream;
mod tokenize;
mod write_timeout;

use std::{net::IpAddr, sync::Arc};

use axum::{
    Router,
    extract::{Path, Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::{Next, from_fn_with_state},
    response::{Html, IntoResponse, Response},
    routing::{get, post},
};
use serde_json::{Value, json};

pub use self::{
    app::{App, ServerOptions},
    gates::Gates,
    serve::serve,
};
use self::{error::ApiError, json::Json};

/// Returns the routes of a server. They need a runtime with several threads, because responses with
/// many log-probabilities block theirs.
pub fn router(app: Arc<App>) -> Router {
    let open = Router::new().route("/", get(page)).route("/health", get(health));
    let closed = Router::new()
        .route("/v1/completions", post(completions::complete))
        .route("/v1/chat/completions", post(chat::chat))
        .route("/v1/models", get(models))
        // A name such as org/model has a slash.
        .route("/v1/models/{*model}", get(model))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/tokenizer_info", get(tokenize::info))
        .route("/metrics", get(metrics))
        .layer(from_fn_with_state(app.clone(), authorize));
    let all = open.merge(closed).fallback(unknown).method_not_allowed_fallback(wrong_method);
    all.layer(from_fn_with_state(app.clone(), refuse_other_sites)).with_state(app)
}

/// Returns the page to chat with the model and to watch the server.
async fn page() -> impl IntoResponse {
    // A page that is framed could be made to send messages by clicks that are meant for another.
    let header = (header::CONTENT_SECURITY_POLICY, "frame-ancestors 'none'");
    ([header], Html(include_str!("page.html")))
}

async fn unknown(request: Request) -> ApiError {
    let path = error::short(request.uri().path());
    ApiError::status(StatusCode::NOT_FOUND, format!("there is no {path}"))
}

async fn wrong_method(request: Request) -> ApiError {
    let message = format!("{} is not a method of this path", request.method());
    ApiError::status(StatusCode::METHOD_NOT_ALLOWED, message)
}

async fn refuse_other_sites(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    check_site(&app, request.headers())?;
    Ok(next.run(request).await)
}

/// Refuses requests that a page of another site makes in the browser of a user.
fn check_site(app: &App, headers: &HeaderMap) -> Result<(), ApiError> {
    let header = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("");
    let (host, origin) = (header(header::HOST), header(header::ORIGIN));
    let refused = |name: &str, value: &str, rule: &str| {
        Err(ApiError::field(name, value, rule).with_status(StatusCode::FORBIDDEN))
    };
    if app.options.is_local && !is_local(host) {
        let rule = "this server listens on a loopback address; call it localhost or by its address";
        return refused("header host", host, rule);
    }
    let site = origin.split_once("://").map_or(origin, |(_, site)| site);
    if app.options.api_key.is_none() && !origin.is_empty() && site != host {
        let rule = "pages of other sites cannot use this server; serve both by one proxy";
        return refused("header origin", origin, rule);
    }
    Ok(())
}

/// Returns whether a host is an address or `localhost`, with or without a port.
fn is_local(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|digit| digit.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']');
    name == "localhost" || address.parse::<IpAddr>().is_ok()
}

async fn authorize(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match &app.options.api_key {
        Some(key) if !is_authorized(request.headers(), key) => {
            let message = "the request needs the header Authorization: Bearer KEY with the key of \
                           this server";
            let error = ApiError::status(StatusCode::UNAUTHORIZED, message);
            error.with_code("invalid_api_key").into_response()
        }
        _ => next.run(request).await,
    }
}

/// Compares all bytes whether or not they are equal, so that the time tells nothing of the key.
fn is_authorized(headers: &HeaderMap, key: &str) -> bool {
    let given = headers.get(header::AUTHORIZATION).map_or(&[][..], |value| value.as_bytes());
    let given = given.strip_prefix(b"Bearer ").unwrap_or(&[]);
    let differing = given.iter().zip(key.as_bytes()).fold(0, |all, (a, b)| all | (a ^ b));
    given.len() == key.len() && differing == 0
}

async fn health(State(app): State<Arc<App>>) -> Response {
    match app.engine.is_ready() {
        true => Json(json!({"status": "ok"})).into_response(),
        false => {
            let status = StatusCode::SERVICE_UNAVAILABLE;
            (status, Json(json!({"status": "stopping"}))).into_response()
        }
    }
}

fn described(app: &App) -> Value {
    json!({
        "id": app.name, "object": "model", "created": 0, "owned_by": "kv-serve",
        "max_model_len": app.engine.room(), "cache": app.cache,
    })
}

async fn models(State(app): State<Arc<App>>) -> Json {
    Json(json!({"object": "list", "data": [described(&app)]}))
}

async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Json, ApiError> {
    app.check_model(Some(&name))?;
    Ok(Json(described(&app)))
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], app.metrics.text()).into_response()
}
