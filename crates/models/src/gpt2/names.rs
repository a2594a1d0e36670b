//! The tensor names of GPT-2.

use crate::{checkpoint::Names, gguf::GgufNames};

pub(super) const NAMES: Names = Names {
    family: "GPT-2",
    prefix: "transformer.",
    layers: "h.",
    embedding: "wte.weight",
    head: "lm_head.weight",
    // Older exports store the causal mask, as `h.0.attn.bias`, and its mask value. Biases of
    // projections have names such as `h.0.attn.c_attn.bias`.
    harmless: |name| name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"),
    ..Names::NONE
};

pub(super) const GGUF: GgufNames = GgufNames {
    layer: ("blk.", "h."),
    outer: &[
        ("token_embd", "wte"),
        ("position_embd", "wpe"),
        ("output_norm", "ln_f"),
        ("output", "lm_head"),
    ],
    inner: &[
        ("attn_norm", "ln_1"),
        ("attn_qkv", "attn.c_attn"),
        ("attn_output", "attn.c_proj"),
        ("ffn_norm", "ln_2"),
        ("ffn_up", "mlp.c_fc"),
        ("ffn_down", "mlp.c_proj"),
    ],
    base: None,
};
