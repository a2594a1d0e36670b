//! Qwen3-MoE: layers of Qwen3 in which experts replace the MLP,
//! <https://arxiv.org/abs/2505.09388>.

mod config;

pub use config::Config;

use crate::{moe::Layer, stack::DecoderStack};

/// Qwen3-MoE, <https://arxiv.org/abs/2505.09388>.
pub type Qwen3Moe = DecoderStack<Layer<Config>>;
