//! A [`Llama`] with random weights, to be trained from scratch.

use burn::{
    module::Param,
    nn::{Embedding, Initializer, RmsNorm, RmsNormConfig},
    tensor::{Device, Tensor},
};

use super::{Config, Layer, Llama};
use crate::nn::{Linear, SwiGlu};

/// Standard deviation of the weights.
const STD: f64 = 0.02;

impl Llama {
    /// Random weights as GPT-2 draws them: normal with standard deviation 0.02, divided by
    /// `sqrt(2 n_layers)` in the two projections per layer that write to the residual stream; norms
    /// 1, biases 0. The device's seed decides them.
    ///
    /// # Panics
    ///
    /// When [`Config::validate`] refuses `config`.
    pub fn init(config: Config, device: &Device) -> Self {
        if let Err(error) = config.validate() {
            panic!("{error}");
        }
        let Config { vocab_size, hidden_size, n_layers, .. } = config;
        let embedding = Embedding { weight: normal([vocab_size, hidden_size], STD, device) };
        let layers = (0..n_layers).map(|_| Layer::init(&config, device)).collect();
        let norm = rms_norm(&config, device);
        let head =
            (!config.tied_head).then(|| linear([vocab_size, hidden_size], STD, false, device));
        Self { embedding, layers, norm, head, rope: config.rope(), config }
    }
}

impl Layer {
    fn init(config: &Config, device: &Device) -> Self {
        let Config { hidden_size, intermediate_size, qkv_bias, output_bias, mlp_bias, .. } =
            *config;
        let attention = config.attention;
        let residual = STD / (2.0 * config.n_layers as f64).sqrt();
        let heads = attention.n_heads * attention.head_dim;
        Self {
            attention_norm: rms_norm(config, device),
            qkv: linear([attention.qkv_rows(), hidden_size], STD, qkv_bias, device),
            output: linear([hidden_size, heads], residual, output_bias, device),
            mlp_norm: rms_norm(config, device),
            mlp: SwiGlu {
                gate_up: linear([2 * intermediate_size, hidden_size], STD, mlp_bias, device),
                down: linear([hidden_size, intermediate_size], residual, mlp_bias, device),
            },
        }
    }
}

fn linear(shape: [usize; 2], std: f64, bias: bool, device: &Device) -> Linear {
    Linear {
        weight: normal(shape, std, device),
        bias: bias.then(|| Initializer::Zeros.init([shape[0]], device)),
    }
}

fn normal(shape: [usize; 2], std: f64, device: &Device) -> Param<Tensor<2>> {
    let param = Initializer::Normal { mean: 0.0, std }.init(shape, device);
    // Burn draws on first use; here, so that the seed and not the order of use decides.
    param.val();
    param
}

fn rms_norm(config: &Config, device: &Device) -> RmsNorm {
    RmsNormConfig::new(config.hidden_size).with_epsilon(config.norm_epsilon).init(device)
}
