//! From tensors under their Hugging Face names to [`Gpt2`].

use burn::{
    module::Param,
    nn::{Embedding, LayerNorm, LayerNormConfig},
    tensor::{Device, Tensor},
};

use super::{Config, Gpt2, Layer};
use crate::{Result, load::Weights, nn::Linear};

impl Gpt2 {
    /// Builds the model, taking each tensor out of `weights` as it goes.
    pub(crate) fn import(config: Config, weights: &mut Weights, device: &Device) -> Result<Self> {
        let Config { vocab_size, hidden_size, max_positions, n_layers, .. } = config;
        weights.strip_prefix("transformer.")?;
        weights.check_family("GPT-2", "wte.weight")?;
        if config.tied_head {
            weights.forget_copy("lm_head.weight", "wte.weight")?;
        }

        let mut matrix = |name: &str, rows| -> Result<Param<Tensor<2>>> {
            weights.matrix(&[(name.to_string(), rows)], hidden_size, device)
        };
        let embedding = Embedding { weight: matrix("wte.weight", vocab_size)? };
        let positions = Embedding { weight: matrix("wpe.weight", max_positions)? };
        let head = if config.tied_head {
            None
        } else {
            Some(Linear { weight: matrix("lm_head.weight", vocab_size)?, bias: None })
        };
        let layers = (0..n_layers)
            .map(|i| Layer::import(&config, i, weights, device))
            .collect::<Result<Vec<_>>>()?;
        let norm = layer_norm(&config, "ln_f", weights, device)?;
        weights.finish("GPT-2", is_harmless)?;
        Ok(Self { embedding, positions, layers, norm, head, config })
    }
}

/// Whether a tensor may be left out: older exports store the causal mask, as `h.0.attn.bias`, and
/// the number it masks with. (The bias of a projection is named like `h.0.attn.c_attn.bias`.)
fn is_harmless(name: &str) -> bool {
    name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias")
}

impl Layer {
    fn import(config: &Config, i: usize, weights: &mut Weights, device: &Device) -> Result<Self> {
        let Config { hidden_size, intermediate_size, .. } = *config;
        let name = |part: &str| format!("h.{i}.{part}");
        let mut linear =
            |part: &str, d_input, d_output| linear(&name(part), d_input, d_output, weights, device);
        let qkv = linear("attn.c_attn", hidden_size, 3 * hidden_size)?;
        let output = linear("attn.c_proj", hidden_size, hidden_size)?;
        let up = linear("mlp.c_fc", hidden_size, intermediate_size)?;
        let down = linear("mlp.c_proj", intermediate_size, hidden_size)?;
        Ok(Self {
            attention_norm: layer_norm(config, &name("ln_1"), weights, device)?,
            qkv,
            output,
            mlp_norm: layer_norm(config, &name("ln_2"), weights, device)?,
            up,
            down,
        })
    }
}

/// GPT-2 checkpoints hold `[d_input, d_output]` ("Conv1D"), unlike every other family.
fn linear(
    name: &str,
    d_input: usize,
    d_output: usize,
    weights: &mut Weights,
    device: &Device,
) -> Result<Linear> {
    let weight = weights.conv1d(&format!("{name}.weight"), d_input, d_output, device)?;
    let bias = weights.vector(&[(format!("{name}.bias"), d_output)], device)?;
    Ok(Linear { weight, bias: Some(bias) })
}

fn layer_norm(
    config: &Config,
    name: &str,
    weights: &mut Weights,
    device: &Device,
) -> Result<LayerNorm> {
    let n = config.hidden_size;
    let mut norm = LayerNormConfig::new(n).with_epsilon(config.norm_epsilon).init(device);
    norm.gamma = weights.vector(&[(format!("{name}.weight"), n)], device)?;
    norm.beta = Some(weights.vector(&[(format!("{name}.bias"), n)], device)?);
    Ok(norm)
}
