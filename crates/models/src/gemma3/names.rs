//! The tensor names of Gemma 3.

use crate::{
    checkpoint::Names,
    gguf::GgufNames,
    stack::{LLAMA_GGUF, LLAMA_NAMES},
};

pub(super) const NAMES: Names = Names {
    family: "Gemma 3",
    harmless: |name| name.ends_with("rotary_emb.inv_freq"),
    ..LLAMA_NAMES
};

pub(super) const GGUF: GgufNames = GgufNames {
    inner: &[
        ("attn_norm", "input_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_down", "mlp.down_proj"),
    ],
    ..LLAMA_GGUF
};
