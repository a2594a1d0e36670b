//! Initializes a [`Llama`] with random weights.

use burn::tensor::Device;

use super::{Config, Layer, Llama};
use crate::nn::{
    Embedding, GatedMlp, Gating, QkNorms, RmsNorm,
    init::{linear, normal},
};

impl Llama {
    /// Creates a model with random weights, which depend on the device's seed.
    ///
    /// Weights are normal with variance `1 / d_input`. This keeps the scale of activations at every
    /// width, so attention is not uniform at first; a fixed standard deviation of 0.02 does so only
    /// at a width of 2500. The two projections per layer that write to the residual stream have a
    /// variance divided by `2 n_layers`, as in GPT-2. The variance of embeddings is `1 /
    /// hidden_size`. Norms are 1, and biases are 0.
    ///
    /// # Panics
    /// Panics when [`Config::validate`] refuses `config`.
    pub fn init(config: Config, device: &Device) -> Self {
        if let Err(error) = config.validate() {
            panic!("{error}");
        }
        let Config { vocab_size, hidden_size, n_layers, .. } = config;
        let embedding = Embedding { weight: normal([vocab_size, hidden_size], 1.0, device) };
        let layers = (0..n_layers).map(|_| Layer::init(&config, device)).collect();
        let norm = rms_norm(&config, device);
        let head =
            (!config.tied_head).then(|| linear([vocab_size, hidden_size], 1.0, false, device));
        Self::new(config, embedding, layers, norm, head)
    }
}

impl Layer {
    fn init(config: &Config, device: &Device) -> Self {
        let Config { hidden_size, intermediate_size, qkv_bias, output_bias, mlp_bias, .. } =
            *config;
        let attention = config.attention;
        let residual = 1.0 / (2.0 * config.n_layers as f64).sqrt();
        let heads = attention.n_heads * attention.head_dim.values;
        Self {
            attention_norm: rms_norm(config, device),
            qkv: linear([attention.qkv_rows(), hidden_size], 1.0, qkv_bias, device),
            output: linear([hidden_size, heads], residual, output_bias, device),
            mlp_norm: rms_norm(config, device),
            mlp: GatedMlp {
                gate_up: linear([2 * intermediate_size, hidden_size], 1.0, mlp_bias, device),
                down: linear([hidden_size, intermediate_size], residual, mlp_bias, device),
                gating: Gating::Silu,
            },
            qk_norms: config.qk_norms.then(|| {
                let norm = || RmsNorm::new(config.head_dim(), config.norm_epsilon, device);
                QkNorms { query: norm(), key: norm() }
            }),
        }
    }
}

fn rms_norm(config: &Config, device: &Device) -> RmsNorm {
    RmsNorm::new(config.hidden_size, config.norm_epsilon, device)
}
