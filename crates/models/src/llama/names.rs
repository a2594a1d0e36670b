//! The tensor names of the Llama family.

use super::Config;
use crate::{LayerSpec, gguf::GgufNames, stack::LLAMA_GGUF};

/// The names of one layer's modules. A projection has the rows of one or more modules, listed with
/// their numbers of rows.
pub(super) struct LayerNames {
    pub(super) attention_norm: String,
    pub(super) qkv: Vec<(String, usize)>,
    pub(super) qk_norms: [String; 2],
    pub(super) output: Vec<(String, usize)>,
    pub(super) mlp_norm: String,
    pub(super) gate_up: Vec<(String, usize)>,
    pub(super) down: Vec<(String, usize)>,
}

impl LayerNames {
    /// Returns the names of layer `i`. `is_fused` returns whether a projection is a single module,
    /// as in Phi-3, whose checkpoints have the same rows in the same order.
    pub(super) fn new(config: &Config, i: usize, is_fused: impl Fn(&str) -> bool) -> Self {
        let LayerSpec { n_heads, n_kv_heads, .. } = config.attention;
        let head_dim = config.head_dim();
        let (q_rows, kv_rows) = (n_heads * head_dim, n_kv_heads * head_dim);
        let Config { hidden_size, intermediate_size, .. } = *config;
        let name = |part: &str| format!("layers.{i}.{part}");
        let rows = |fused: &str, parts: &[(&str, usize)]| {
            if is_fused(&name(fused)) {
                return vec![(name(fused), parts.iter().map(|(_, rows)| rows).sum())];
            }
            parts.iter().map(|&(part, rows)| (name(part), rows)).collect()
        };
        let qkv = [
            ("self_attn.q_proj", q_rows),
            ("self_attn.k_proj", kv_rows),
            ("self_attn.v_proj", kv_rows),
        ];
        let gate_up = [("mlp.gate_proj", intermediate_size), ("mlp.up_proj", intermediate_size)];
        Self {
            attention_norm: name("input_layernorm"),
            qkv: rows("self_attn.qkv_proj", &qkv),
            qk_norms: [name("self_attn.q_norm"), name("self_attn.k_norm")],
            output: vec![(name("self_attn.o_proj"), hidden_size)],
            mlp_norm: name("post_attention_layernorm"),
            gate_up: rows("mlp.gate_up_proj", &gate_up),
            down: vec![(name("mlp.down_proj"), hidden_size)],
        }
    }
}

pub(super) const GGUF: GgufNames = GgufNames {
    inner: &[
        ("attn_norm", "input_layernorm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_qkv", "self_attn.qkv_proj"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_norm", "post_attention_layernorm"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ],
    ..LLAMA_GGUF
};

/// Phi-3 stores its gate in the rows of `ffn_up`.
pub(super) const GGUF_PHI3: GgufNames = GgufNames {
    inner: &[
        ("attn_norm", "input_layernorm"),
        ("attn_qkv", "self_attn.qkv_proj"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_norm", "post_attention_layernorm"),
        ("ffn_up", "mlp.gate_up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ],
    ..GGUF
};
