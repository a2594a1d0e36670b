//! The tensor names of gpt-oss.

use crate::{checkpoint::Names, gguf::GgufNames, stack};

pub(super) const NAMES: Names = Names {
    family: "gpt-oss",
    harmless: |name| name.ends_with("rotary_emb.inv_freq"),
    ..stack::LLAMA_NAMES
};

pub(super) const GGUF: GgufNames = GgufNames {
    inner: &[
        ("attn_norm", "input_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("attn_sinks", "self_attn.sinks"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_gate_inp", "mlp.router"),
        ("ffn_gate_exps", "mlp.experts.gate_proj"),
        ("ffn_up_exps", "mlp.experts.up_proj"),
        ("ffn_down_exps", "mlp.experts.down_proj"),
    ],
    ..stack::LLAMA_GGUF
};
