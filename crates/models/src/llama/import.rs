//! Imports a [`Layer`] from the Hugging Face names.

use super::{Config, Layer, names::LayerNames};
use crate::{
    Result,
    checkpoint::Weights,
    nn::{GatedMlp, Gating},
};

impl Layer {
    pub(super) fn take(config: &Config, i: usize, weights: &mut Weights) -> Result<Self> {
        let Config { hidden_size, intermediate_size, norm_epsilon, .. } = *config;
        let is_fused = |module: &str| weights.contains(&format!("{module}.weight"));
        let names = LayerNames::new(config, i, is_fused);
        let heads = config.attention.n_heads * config.attention.head_dim.values;
        Ok(Self {
            attention_norm: weights.rms_norm(&names.attention_norm, hidden_size, norm_epsilon)?,
            qkv: weights.linear(&names.qkv, hidden_size, config.qkv_bias)?,
            output: weights.linear(&names.output, heads, config.output_bias)?,
            mlp_norm: weights.rms_norm(&names.mlp_norm, hidden_size, norm_epsilon)?,
            mlp: GatedMlp {
                gate_up: weights.linear(&names.gate_up, hidden_size, config.mlp_bias)?,
                down: weights.linear(&names.down, intermediate_size, config.mlp_bias)?,
                gating: Gating::Silu,
            },
            qk_norms: match config.qk_norms {
                true => Some(weights.qk_norms(&names.qk_norms, config.head_dim(), norm_epsilon)?),
                false => None,
            },
        })
    }
}
