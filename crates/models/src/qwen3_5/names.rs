//! The tensor names of Qwen3.5.

use crate::{
    checkpoint::Names,
    gguf::GgufNames,
    stack::{LLAMA_NAMES, gguf_names},
};

pub(super) const NAMES: Names = Names {
    family: "Qwen3.5",
    text_prefix: Some("model.language_model."),
    unused: &[
        ("visual.", "the image encoder"),
        ("mtp.", "the prediction of several tokens at once"),
    ],
    ..LLAMA_NAMES
};

pub(super) const GGUF: GgufNames = gguf_names(&[
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_dt", "linear_attn.dt"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
]);
