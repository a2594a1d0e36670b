//! Imports and exports the tensors of Gemma 3.

use super::{Config, Layer};
use crate::{
    Result,
    checkpoint::{Exports, Names, Weights},
    gguf::GgufNames,
    nn::{GatedMlp, Gating, QkNorms},
    stack::{LLAMA_GGUF, LLAMA_NAMES, attention_parts},
};

pub(super) const NAMES: Names = Names {
    family: "Gemma 3",
    harmless: |name| name.ends_with("rotary_emb.inv_freq"),
    ..LLAMA_NAMES
};

pub(super) const GGUF: GgufNames = GgufNames {
    inner: &[
        ("attn_norm", "input_layernorm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
        ("attn_output", "self_attn.o_proj"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
    ],
    ..LLAMA_GGUF
};

/// The names of one layer's modules, for projections with their numbers of rows.
struct LayerNames {
    norms: [String; 6],
    qkv: Vec<(String, usize)>,
    output: Vec<(String, usize)>,
    gate_up: Vec<(String, usize)>,
    down: Vec<(String, usize)>,
}

impl LayerNames {
    fn new(config: &Config, i: usize) -> Self {
        let name = |part: &str| format!("layers.{i}.{part}");
        let rows = |part: &str, rows| (name(part), rows);
        let Config { hidden_size, intermediate_size, head_dim, n_heads, n_kv_heads, .. } = *config;
        let [qkv, output] = attention_parts(i, hidden_size, [n_heads, n_kv_heads, head_dim]);
        Self {
            norms: [
                "input_layernorm",
                "self_attn.q_norm",
                "self_attn.k_norm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ]
            .map(name),
            qkv,
            output,
            gate_up: vec![
                rows("mlp.gate_proj", intermediate_size),
                rows("mlp.up_proj", intermediate_size),
            ],
            down: vec![rows("mlp.down_proj", hidden_size)],
        }
    }
}

impl Layer {
    /// Adds the tensors of layer `i`.
    pub(super) fn give(&self, config: &Config, i: usize, exports: &mut Exports) {
        let names = LayerNames::new(config, i);
        exports.linear(&names.qkv, &self.qkv);
        exports.linear(&names.output, &self.output);
        exports.linear(&names.gate_up, &self.mlp.gate_up);
        exports.linear(&names.down, &self.mlp.down);
        let norms = [
            &self.attention_norm,
            &self.qk_norms.query,
            &self.qk_norms.key,
            &self.post_attention_norm,
            &self.mlp_norm,
            &self.post_mlp_norm,
        ];
        for (name, norm) in names.norms.iter().zip(norms) {
            exports.rms_norm(name, norm);
        }
    }

    pub(super) fn take(config: &Config, i: usize, weights: &mut Weights) -> Result<Self> {
        let Config { hidden_size, intermediate_size, head_dim, attention_bias: bias, .. } = *config;
        let LayerNames { norms, qkv, output, gate_up, down } = LayerNames::new(config, i);
        let [attention, query, key, post_attention, mlp, post_mlp] = norms;
        let mut norm = |name, width| weights.rms_norm_plus_one(name, width, config.norm_epsilon);
        Ok(Self {
            attention_norm: norm(&attention, hidden_size)?,
            qk_norms: QkNorms { query: norm(&query, head_dim)?, key: norm(&key, head_dim)? },
            post_attention_norm: norm(&post_attention, hidden_size)?,
            mlp_norm: norm(&mlp, hidden_size)?,
            post_mlp_norm: norm(&post_mlp, hidden_size)?,
            qkv: weights.linear(&qkv, hidden_size, bias)?,
            output: weights.linear(&output, config.n_heads * head_dim, bias)?,
            mlp: GatedMlp {
                gate_up: weights.linear(&gate_up, hidden_size, false)?,
                down: weights.linear(&down, intermediate_size, false)?,
                gating: Gating::GeluTanh,
            },
        })
    }
}
