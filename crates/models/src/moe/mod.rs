//! Layers of the Llama family in which experts replace the MLP, for
//! [`qwen3_moe`](crate::qwen3_moe) and [`mixtral`](crate::mixtral).

mod config;
mod experts;
mod layer;

pub use config::{ExpertNames, ExpertsConfig, MoeConfig};
pub use experts::Experts;
pub use layer::Layer;
