//! Modules that all families share. `kv-cubecl` applies the causal mask, so this crate has none.

mod attention;
#[cfg(feature = "flex")]
mod bf16;
mod expert_stack;
#[cfg(feature = "flex")]
mod few_rows;
pub mod init;
mod linear;
mod low_rank;
mod matrix;
mod mlp;
mod norm;
mod packing;
mod project;
#[cfg(feature = "flex")]
mod rms;
mod rope;
mod routed;
mod rows;
mod sparse_states;

pub(crate) use attention::SparsePlace;
pub use attention::{AttentionObserver, AttentionTrace, KvTrace, Memory, TraceKind};
pub use expert_stack::{ExpertStack, ExpertStacks};
pub use linear::{Embedding, Linear};
pub use matrix::Matrix;
pub(crate) use matrix::{PACKED, PackedSize};
pub use mlp::{GatedMlp, Gating, gated, in_f32, soft_capped};
pub(crate) use norm::norm_heads;
pub use norm::{LayerNorm, QkNorms, RmsNorm, unit_rms};
pub use packing::Packing;
pub use project::project;
pub(crate) use rope::yarn_gain;
pub use rope::{Rope, RopeRows, RopeScaling};
pub use routed::Routed;
pub use rows::by_rows;
pub use sparse_states::SparseStates;
