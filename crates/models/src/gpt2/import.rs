//! Imports a [`Layer`] from the Hugging Face names.

use super::{Config, Layer};
use crate::{Result, checkpoint::Weights};

impl Layer {
    pub(super) fn take(config: &Config, i: usize, weights: &mut Weights) -> Result<Self> {
        let Config { hidden_size, intermediate_size, norm_epsilon, .. } = *config;
        let name = |part: &str| format!("h.{i}.{part}");
        let qkv = weights.conv1d(&name("attn.c_attn"), hidden_size, 3 * hidden_size)?;
        let output = weights.conv1d(&name("attn.c_proj"), hidden_size, hidden_size)?;
        let up = weights.conv1d(&name("mlp.c_fc"), hidden_size, intermediate_size)?;
        let down = weights.conv1d(&name("mlp.c_proj"), intermediate_size, hidden_size)?;
        let mut norm = |part: &str| weights.layer_norm(&name(part), hidden_size, norm_epsilon);
        let (attention_norm, mlp_norm) = (norm("ln_1")?, norm("ln_2")?);
        let activation = config.activation;
        Ok(Self { attention_norm, qkv, output, mlp_norm, up, down, activation })
    }
}
