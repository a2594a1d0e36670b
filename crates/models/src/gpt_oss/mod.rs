//! gpt-oss: a mixture of experts with learned attention sinks, and sliding windows in some layers:
//! <https://arxiv.org/abs/2508.10925>.

mod config;
mod experts;
mod model;
mod names;

pub use config::Config;
pub use experts::{Expert, Experts};
pub use model::{GptOss, Layer};
