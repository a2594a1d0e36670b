//! Gemma 4, the text model: <https://ai.google.dev/gemma/docs/core>. Its last layers share the
//! caches of earlier ones, and every layer gets a small input for each token. The text part of
//! checkpoints with images and audio loads, too.

mod attention;
mod config;
mod file;
mod model;
mod names;

pub use attention::Attention;
pub use config::Config;
pub use model::{Gemma4, Layer, PerLayer};
