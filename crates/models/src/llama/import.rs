//! From tensors under their Hugging Face names to [`Llama`].

use super::{
    Config, Layer, Llama,
    names::{LayerNames, NAMES},
};
use crate::{
    Result,
    checkpoint::Weights,
    nn::{GatedMlp, Gating},
};

impl Llama {
    /// Builds the model, taking each tensor out of `weights` as it goes.
    pub(super) fn import(config: Config, weights: &mut Weights) -> Result<Self> {
        let Config { vocab_size, hidden_size, .. } = config;
        let spec = config.spec();
        weights.begin(&NAMES, &spec, config.tied_head)?;
        let embedding = weights.embedding("embed_tokens", vocab_size, hidden_size)?;
        let norm = weights.rms_norm("norm", hidden_size, config.norm_epsilon)?;
        let head = weights.head(config.tied_head, vocab_size, hidden_size)?;
        let model = |spec, layers| Self {
            embedding: embedding.clone(),
            spec,
            layers,
            norm: norm.clone(),
            head: head.clone(),
            config: config.clone(),
        };
        let layer = |weights: &mut Weights, i| Layer::import(&config, i, weights);
        weights.layers(&spec, layer, model)
    }
}

impl Layer {
    fn import(config: &Config, i: usize, weights: &mut Weights) -> Result<Self> {
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
