//! Reads [`Config`] from the metadata of a GGUF file.

use super::{Activation, Config};
use crate::{Result, checkpoint::Weights, gguf::Metadata};

impl Config {
    pub(super) fn from_gguf(metadata: &Metadata<'_>, weights: &Weights) -> Result<Self> {
        let config = Self {
            vocab_size: weights.rows("wte.weight")?,
            hidden_size: metadata.size("embedding_length")?,
            intermediate_size: metadata.size("feed_forward_length")?,
            n_layers: metadata.size("block_count")?,
            n_heads: metadata.size("attention.head_count")?,
            max_positions: metadata.size("context_length")?,
            norm_epsilon: metadata.float("attention.layer_norm_epsilon")?.unwrap_or(1e-5),
            activation: Activation::GeluTanh,
            tied_head: !weights.contains("lm_head.weight"),
        };
        config.check(metadata.path())?;
        Ok(config)
    }
}
