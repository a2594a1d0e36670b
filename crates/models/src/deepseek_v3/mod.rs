//! DeepSeek-V3, <https://arxiv.org/abs/2412.19437>: all heads attend to one latent row per token.
//! DeepSeek-V2 and Kimi K2 have the same layers.

mod attention;
mod config;
mod gguf;
mod json;
mod model;
mod names;

pub use attention::LatentAttention;
pub use config::Config;
pub use model::{DeepseekV3, Layer};
