//! The tensor names of gpt-oss.

use crate::{
    checkpoint::Names,
    gguf::GgufNames,
    stack::{LLAMA_NAMES, gguf_names},
};

pub(super) const NAMES: Names = Names {
    family: "gpt-oss",
    harmless: |name| name.ends_with("rotary_emb.inv_freq"),
    ..LLAMA_NAMES
};

pub(super) const GGUF: GgufNames = gguf_names(&[
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_sinks", "self_attn.sinks"),
    ("ffn_gate_inp", "mlp.router"),
]);
