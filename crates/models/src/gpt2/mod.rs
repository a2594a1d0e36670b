//! GPT-2.

mod config;
mod model;
mod names;

pub use config::{Activation, Config};
pub use model::{Gpt2, Layer};
