//! Quantization-aware training (QAT) for quantized KV caches: fine-tune a model with the noise that
//! its cache adds in serving, so that it keeps its quality at 2 bits.
//!
//! One [`ModelCacheConfig`](kv_models::ModelCacheConfig) drives post-training evaluation, training
//! and serving: [`prepare`] makes the parallel forward pass use it, [`train`] updates the weights,
//! [`convert`](Prepared::convert) returns the plain model with the configuration beside it.
//!
//! ```no_run
//! use kv_models::kv_cubecl::{Autodiff, Flex, On};
//! use kv_train::{QatConfig, prepare};
//!
//! # fn main() -> anyhow::Result<()> {
//! let device = On::<Autodiff<Flex>>::open()?;
//! let loaded = kv_models::load("models/austen", &device)?;
//! let config = QatConfig::new("k2v2".parse::<kv_models::kv_cubecl::KvCacheConfig>()?);
//! let prepared = prepare(loaded.model, config)?;
//! // ... any training loop over `prepared.forward(ids)`, or `kv_train::train` ...
//! prepared.convert().save("models/austen-k2v2", &loaded.tokenizer?)?;
//! # Ok(())
//! # }
//! ```

pub mod bench;
mod checkpoint;
mod config;
#[cfg(feature = "tui")]
mod dashboard;
pub mod data;
mod error;
mod fit;
mod folder;
mod history;
mod index_losses;
mod loss;
mod metrics;
mod optimize;
mod qat;
mod renderer;
mod report;
mod setup;
mod step;
mod train;
#[cfg(feature = "remote")]
mod worker;
mod workers;
mod world;

pub use checkpoint::Checkpoints;
pub use config::{Adapter, Objective, Schedule, TrainConfig, Trainable};
#[cfg(feature = "tui")]
pub use dashboard::restore_terminal;
pub use error::{Error, Result};
pub use folder::{Resume, check_new};
pub use history::{GroupShares, History, LogLine, StepRecord, ValidRecord};
pub use metrics::Measured;
pub use qat::{Converted, Prepared, QatConfig, prepare};
pub use report::write_report;
pub use step::Trainee;
pub use train::{Run, Texts, Trained, checkpointed, train};
#[cfg(feature = "remote")]
pub use worker::{Operations, Worker};
pub use workers::Strategy;
pub use world::{
    WorldConfig, WorldHistory, WorldRun, WorldStep, WorldValid, checkpointed_world, train_world,
    world_config,
};
