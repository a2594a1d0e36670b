//! Evaluation of language models with quantized KV caches. It measures perplexity and KL divergence
//! from the float cache, token by token or in the equivalent closed form; loss by position; error
//! by layer; accuracy in multiple-choice tasks; and speed by context length. Reports have charts.
//!
//! The `kv-eval` program is a thin wrapper of these functions.

pub mod bench;
mod continuation;
mod devices;
mod error;
mod files;
mod ids;
mod index;
pub mod layers;
pub mod memory;
mod needle;
mod perplexity;
mod plan;
pub mod planner;
mod report;
mod retrieval;
mod run;
mod score;
pub mod search;
pub mod tasks;
mod twin;
mod versions;
pub mod world;

pub use continuation::{ContinuationPlan, Continuations, continuations};
pub use devices::{Devices, thread_pools};
pub use error::{Error, Result};
pub use index::{IndexRecall, KeyFormat, RecallCell, index_recall};
pub use layers::layer_errors;
pub use needle::{NeedlePlan, NeedleRow, Needles, needles};
pub use perplexity::{HEAD_ROWS, Progress, evaluate};
pub use plan::{Mode, Plan};
pub use report::{Report, device_name};
pub use retrieval::{
    Haystack, NeedleType, Retrieval, RetrievalPlan, RetrievalRow, RetrievalTask, retrieval,
};
pub use run::{LayerError, PositionKl, PositionNll, Run};
pub use twin::{LayerCounters, SideCounters, Twin, TwinLayer, TwinStep, twin};
pub use versions::Versions;
