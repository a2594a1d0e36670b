//! Layers of the Llama family in which experts replace the MLP, for
//! [`qwen3_moe`](crate::qwen3_moe) and [`mixtral`](crate::mixtral). [`deepseek_v3`] has the same
//! experts, and [`deepseek_v4`] the same [`Routing`].
//!
//! [`deepseek_v3`]: crate::deepseek_v3
//! [`deepseek_v4`]: crate::deepseek_v4

mod config;
mod experts;
mod feed_forward;
mod layer;
mod routing;

pub use config::{ExpertNames, ExpertsConfig, MoeConfig};
pub use experts::Experts;
pub(crate) use feed_forward::FeedForward;
pub use layer::Layer;
pub use routing::{ExpertGroups, Routing, Scores};
