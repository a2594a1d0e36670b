//! Qwen3.5: three layers of the gated delta rule for each layer of gated attention,
//! <https://arxiv.org/abs/2412.06464> and <https://arxiv.org/abs/2505.06708>. The text part of
//! checkpoints with images loads, too.

mod attention;
mod config;
mod linear_attention;
mod model;
mod names;

pub use attention::GatedAttention;
pub use config::Config;
pub use linear_attention::LinearAttention;
pub use model::{Layer, Qwen35};
