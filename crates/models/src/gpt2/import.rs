//! From tensors under their Hugging Face names to [`Gpt2`].

use super::{Config, Gpt2, Layer, names::NAMES};
use crate::{Result, checkpoint::Weights};

impl Gpt2 {
    /// Builds the model, taking each tensor out of `weights` as it goes.
    pub(super) fn import(config: Config, weights: &mut Weights) -> Result<Self> {
        let Config { vocab_size, hidden_size, max_positions, .. } = config;
        let spec = config.spec();
        weights.begin(&NAMES, &spec, config.tied_head)?;
        let embedding = weights.embedding("wte", vocab_size, hidden_size)?;
        let positions = weights.embedding("wpe", max_positions, hidden_size)?;
        let head = weights.head(config.tied_head, vocab_size, hidden_size)?;
        let norm = weights.layer_norm("ln_f", hidden_size, config.norm_epsilon)?;
        let model = |spec, layers| Self {
            embedding: embedding.clone(),
            positions: positions.clone(),
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
        let name = |part: &str| format!("h.{i}.{part}");
        let qkv = weights.conv1d(&name("attn.c_attn"), hidden_size, 3 * hidden_size)?;
        let output = weights.conv1d(&name("attn.c_proj"), hidden_size, hidden_size)?;
        let up = weights.conv1d(&name("mlp.c_fc"), hidden_size, intermediate_size)?;
        let down = weights.conv1d(&name("mlp.c_proj"), intermediate_size, hidden_size)?;
        let mut norm = |part: &str| weights.layer_norm(&name(part), hidden_size, norm_epsilon);
        Ok(Self { attention_norm: norm("ln_1")?, qkv, output, mlp_norm: norm("ln_2")?, up, down })
    }
}
