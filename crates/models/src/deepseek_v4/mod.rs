//! DeepSeek-V4 (2026): sparse attention to compressed entries, several residual streams and a
//! mixture of experts.

mod attention;
mod compressor;
mod config;
mod experts;
mod hyper;
mod json;
mod mode;
mod model;
mod names;

pub use attention::Attention;
pub use compressor::{EntryCompressor, Indexer, KeyCompressor, Projections};
pub use config::{Config, LayerKind};
pub use experts::{Expert, Experts};
pub use hyper::{HyperConnection, JoinedNorm, StreamWeights, sinkhorn};
pub use mode::Mode;
pub use model::{DeepseekV4, Layer};
