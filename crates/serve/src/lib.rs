//! An OpenAI-compatible server for language models with quantized KV caches.
//!
//! One thread, the [`Engine`], owns the model and continues all texts together, with continuous
//! batching: prompts are prefilled in chunks between decode steps. [`router`] has the HTTP side,
//! [`serve`] the connections. The program `kv-serve` joins them.

pub mod constraint;
pub mod engine;
mod http;
mod metrics;
mod tools;

pub use engine::{Engine, EngineOptions};
pub use http::{App, Gates, ServerOptions, router, serve};
pub use metrics::{Metrics, Outcome};
