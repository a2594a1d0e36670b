//! Mixtral: layers of Mistral in which experts replace the MLP, <https://arxiv.org/abs/2401.04088>.

mod config;

pub use config::Config;

use crate::{moe::Layer, stack::DecoderStack};

/// Mixtral, <https://arxiv.org/abs/2401.04088>.
pub type Mixtral = DecoderStack<Layer<Config>>;
