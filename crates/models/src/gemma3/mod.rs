//! Gemma 3, the text model: <https://arxiv.org/abs/2503.19786>.

mod config;
mod model;
mod names;

pub use config::Config;
pub use model::{Gemma3, Layer};
pub(crate) use names::GGUF;
