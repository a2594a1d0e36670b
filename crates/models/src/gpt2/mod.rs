//! GPT-2.

mod config;
mod export;
mod import;
mod model;

pub use config::{Activation, Config};
pub use model::{Gpt2, Layer};
