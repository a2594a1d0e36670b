//! The Llama family: Llama 2 and 3, SmolLM and SmolLM2, Mistral and Phi-3 up to their sliding windows,
//! Qwen2.

mod config;
mod export;
mod import;
mod init;
mod model;
mod resolve;

pub use config::Config;
pub(crate) use config::{positive, required};
pub use model::{Layer, Llama};
pub(crate) use resolve::{cap_at_window, note_longrope};
