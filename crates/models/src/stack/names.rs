//! Tensor names that several families have in common.

use crate::{checkpoint::Names, gguf::GgufNames};

/// The names that Llama's checkpoints and most later ones have in common.
pub(crate) const LLAMA_NAMES: Names = Names {
    family: "Llama",
    prefix: "model.",
    layers: "layers.",
    embedding: "embed_tokens.weight",
    head: "lm_head.weight",
    // Older exports store the rope frequencies, which follow from the configuration.
    harmless: |name| {
        name.ends_with("rotary_emb.inv_freq") || name.ends_with("attn_rot_embd.weight")
    },
    ..Names::NONE
};

/// The names of the Llama family, and of experts that replace the MLP. The families that use
/// [`LLAMA_NAMES`] have most of them, and add their own by [`gguf_names`].
pub(crate) const LLAMA_GGUF: GgufNames = GgufNames {
    layer: ("blk.", "layers."),
    outer: &[("token_embd", "embed_tokens"), ("output_norm", "norm"), ("output", "lm_head")],
    inner: &[
        ("attn_norm", "input_layernorm"),
        ("attn_qkv", "self_attn.qkv_proj"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_norm", "post_attention_layernorm"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
        ("ffn_gate_inp", "mlp.gate"),
        ("ffn_gate_exps", "mlp.experts.gate_proj"),
        ("ffn_up_exps", "mlp.experts.up_proj"),
        ("ffn_down_exps", "mlp.experts.down_proj"),
    ],
    base: None,
};

/// Returns the names in `inner`, and [`LLAMA_GGUF`] for the tensors that it does not name.
pub(crate) const fn gguf_names(inner: &'static [(&'static str, &'static str)]) -> GgufNames {
    GgufNames { layer: LLAMA_GGUF.layer, outer: &[], inner, base: Some(&LLAMA_GGUF) }
}
