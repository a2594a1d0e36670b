//! Qwen3-MoE: layers of Qwen3 in which experts replace the MLP,
//! <https://arxiv.org/abs/2505.09388>.

mod config;
mod experts;
mod model;

pub use config::Config;
pub use experts::Experts;
pub use model::{Layer, Qwen3Moe};
