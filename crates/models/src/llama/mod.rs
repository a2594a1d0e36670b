//! The Llama family: Llama 2 and 3, Mistral, SmolLM, SmolLM2 and SmolLM3, Qwen2 and Qwen3, Phi-3
//! and Phi-4-mini. [`Config`] covers their differences.

mod config;
mod decoder;
mod gguf;
mod model;
mod names;
mod resolve;

pub use config::Config;
pub(crate) use model::QK_NORMS;
pub use model::{Layer, Llama};
pub(crate) use names::fused;
