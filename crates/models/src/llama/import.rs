//! From tensors under their Hugging Face names to [`Llama`].

use burn::{
    nn::{Embedding, RmsNorm},
    tensor::Device,
};

use super::{Config, Layer, Llama};
use crate::{
    Result,
    load::Weights,
    nn::{AttentionShape, Linear, SwiGlu},
};

impl Llama {
    /// Builds the model, taking each tensor out of `weights` as it goes.
    pub(crate) fn import(config: Config, weights: &mut Weights, device: &Device) -> Result<Self> {
        let Config { vocab_size, hidden_size, n_layers, .. } = config;
        weights.strip_prefix("model.")?;
        weights.check_family("Llama", "embed_tokens.weight")?;
        if config.tied_head {
            weights.forget_copy("lm_head.weight", "embed_tokens.weight")?;
        }

        let embedding = Embedding {
            weight: weights.matrix(&[part("embed_tokens", vocab_size)], hidden_size, device)?,
        };
        let layers = (0..n_layers)
            .map(|i| Layer::import(&config, i, weights, device))
            .collect::<Result<Vec<_>>>()?;
        let norm = rms_norm(&config, "norm", weights, device)?;
        let head = if config.tied_head {
            None
        } else {
            let parts = [part("lm_head", vocab_size)];
            Some(Linear { weight: weights.matrix(&parts, hidden_size, device)?, bias: None })
        };
        weights.finish("Llama", is_harmless)?;
        Ok(Self { embedding, layers, norm, head, rope: config.rope(), config })
    }
}

/// Whether a tensor may be left out: older exports store the rotary frequencies, which follow from
/// the configuration.
fn is_harmless(name: &str) -> bool {
    name.ends_with("rotary_emb.inv_freq") || name.ends_with("attn_rot_embd.weight")
}

impl Layer {
    fn import(config: &Config, i: usize, weights: &mut Weights, device: &Device) -> Result<Self> {
        let Config { hidden_size, intermediate_size, .. } = *config;
        let AttentionShape { n_heads, n_kv_heads, head_dim } = config.attention;
        let (q_rows, kv_rows) = (n_heads * head_dim, n_kv_heads * head_dim);
        let attention = |name: &str| format!("layers.{i}.self_attn.{name}");
        let mlp = |name: &str| format!("layers.{i}.mlp.{name}");

        // Phi-3 ships the projections fused, the others apart; the rows are in the same order.
        let qkv = if weights.contains(&format!("{}.weight", attention("qkv_proj"))) {
            vec![(attention("qkv_proj"), q_rows + 2 * kv_rows)]
        } else {
            vec![
                (attention("q_proj"), q_rows),
                (attention("k_proj"), kv_rows),
                (attention("v_proj"), kv_rows),
            ]
        };
        let gate_up = if weights.contains(&format!("{}.weight", mlp("gate_up_proj"))) {
            vec![(mlp("gate_up_proj"), 2 * intermediate_size)]
        } else {
            vec![(mlp("gate_proj"), intermediate_size), (mlp("up_proj"), intermediate_size)]
        };
        let output = vec![(attention("o_proj"), hidden_size)];
        let down = vec![(mlp("down_proj"), hidden_size)];

        let attention_norm = format!("layers.{i}.input_layernorm");
        let mlp_norm = format!("layers.{i}.post_attention_layernorm");
        Ok(Self {
            attention_norm: rms_norm(config, &attention_norm, weights, device)?,
            qkv: linear(&qkv, hidden_size, config.qkv_bias, weights, device)?,
            output: linear(&output, q_rows, config.output_bias, weights, device)?,
            mlp_norm: rms_norm(config, &mlp_norm, weights, device)?,
            mlp: SwiGlu {
                gate_up: linear(&gate_up, hidden_size, config.mlp_bias, weights, device)?,
                down: linear(&down, intermediate_size, config.mlp_bias, weights, device)?,
            },
        })
    }
}

fn part(name: &str, rows: usize) -> (String, usize) {
    (format!("{name}.weight"), rows)
}

fn linear(
    parts: &[(String, usize)],
    d_input: usize,
    bias: bool,
    weights: &mut Weights,
    device: &Device,
) -> Result<Linear> {
    let named = |suffix: &str| -> Vec<_> {
        parts.iter().map(|(name, rows)| (format!("{name}.{suffix}"), *rows)).collect()
    };
    let weight = weights.matrix(&named("weight"), d_input, device)?;
    let bias = if bias { Some(weights.vector(&named("bias"), device)?) } else { None };
    Ok(Linear { weight, bias })
}

fn rms_norm(
    config: &Config,
    name: &str,
    weights: &mut Weights,
    device: &Device,
) -> Result<RmsNorm> {
    let gamma = weights.vector(&[part(name, config.hidden_size)], device)?;
    Ok(RmsNorm { gamma, epsilon: config.norm_epsilon })
}
