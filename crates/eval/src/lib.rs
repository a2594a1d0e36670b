//! Evaluating language models with quantized KV caches: perplexity and KL divergence against the
//! float cache, streamed token by token or in the equivalent closed form; loss by position, error
//! by layer; speed by context length; reports with charts.
//!
//! The `kv-eval` program is a thin shell around these functions.

pub mod bench;
mod error;
mod ids;
pub mod layers;
pub mod memory;
mod perplexity;
mod plan;
pub mod planner;
mod report;
mod run;
mod score;
pub mod search;
mod twin;
pub mod world;

pub use error::{Error, Result};
pub use layers::layer_errors;
pub use perplexity::{Progress, evaluate};
pub use plan::{Mode, Plan};
pub use report::{Report, Versions, device_name};
pub use run::{LayerError, PositionNll, Run};
pub use twin::{LayerCounters, SideCounters, Twin, TwinLayer, TwinStep, twin};
