//! The Llama family: Llama 2 and 3, SmolLM and SmolLM2, Mistral without a sliding window, Qwen2,
//! Phi-3.

mod config;
mod export;
mod import;
mod init;
mod model;

pub use config::Config;
pub(crate) use config::{positive, required};
pub use model::{Layer, Llama};
