//! Evaluating language models with quantized KV caches: perplexity and KL divergence against the
//! float cache, streamed token by token or in the equivalent closed form; speed by context length.
//!
//! The `kv-eval` program is a thin shell around these functions.

pub mod bench;
mod error;
mod perplexity;
mod plan;
mod report;
mod score;

pub use error::{Error, Result};
pub use perplexity::evaluate;
pub use plan::{Mode, Plan};
pub use report::{Report, Run, Versions};
