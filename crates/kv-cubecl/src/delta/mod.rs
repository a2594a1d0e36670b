//! The gated delta rule (Yang et al., 2024, <https://arxiv.org/abs/2412.06464>), as in the linear
//! attention of Qwen3-Next and Qwen3.5.
//!
//! A head keeps a matrix instead of keys and values, so its memory does not grow with the tokens.
//! With the key k, the value v, the decay a and the strength b of a token, the state S becomes
//! `a (I - b k k^T) S + b k v^T`: what the state predicts for the key is replaced by the value. The
//! output is `S^T q` for the query q. Queries, keys and values first pass a convolution over the
//! last few tokens, whose inputs are a part of the state.
//!
//! [`DeltaMemory`] serves training, evaluation and streaming: whole sequences are computed in
//! chunks by matrix products, and single tokens in one fused step.

mod chunks;
mod config;
mod memory;
mod ops;
mod slots;
mod state;
mod tokens;

pub use chunks::{DeltaInputs, gated_delta_rule};
pub use config::{DeltaConfig, HeadOrder};
pub use memory::DeltaMemory;
pub use ops::{DeltaOps, DeltaStore, StepInputs, StepWeights};
pub use slots::{DeltaPart, DeltaPartLayout};
pub use state::DeltaState;
#[cfg(any(feature = "flex", feature = "cube"))]
pub(crate) use tokens::LENGTH_EPSILON;
pub use tokens::{DeltaTokens, DeltaWeights};
