//! The tensor names of Gemma 4.

use crate::{
    checkpoint::Names,
    gguf::GgufNames,
    stack::{LLAMA_GGUF, LLAMA_NAMES},
};

pub(super) const NAMES: Names = Names {
    family: "Gemma 4",
    text_prefix: Some("model.language_model."),
    tables: &["embed_tokens_per_layer.weight"],
    // GGUF files have the scalar as a weight.
    aliases: &[("layer_scalar.weight", "layer_scalar")],
    unused: &[
        ("vision_tower.", "the image encoder"),
        ("embed_vision.", "the image encoder"),
        ("audio_tower.", "the audio encoder"),
        ("embed_audio.", "the audio encoder"),
    ],
    ..LLAMA_NAMES
};

pub(super) const GGUF: GgufNames = GgufNames {
    outer: &[
        ("token_embd", "embed_tokens"),
        ("output_norm", "norm"),
        ("output", "lm_head"),
        ("per_layer_token_embd", "embed_tokens_per_layer"),
        ("per_layer_model_proj", "per_layer_model_projection"),
        ("per_layer_proj_norm", "per_layer_projection_norm"),
    ],
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
        ("inp_gate", "per_layer_input_gate"),
        ("proj", "per_layer_projection"),
        ("post_norm", "post_per_layer_input_norm"),
        ("layer_output_scale", "layer_scalar"),
    ],
    ..LLAMA_GGUF
};
