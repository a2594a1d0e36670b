//! The Llama family: Llama 2 and 3, SmolLM and SmolLM2, Qwen2, and Mistral and Phi-3 in contexts up
//! to their sliding windows.

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
