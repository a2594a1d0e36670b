//! The tensor names of Gemma 4.

use crate::{checkpoint::Names, gemma3, gguf::GgufNames, stack::LLAMA_NAMES};

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
        ("per_layer_token_embd", "embed_tokens_per_layer"),
        ("per_layer_model_proj", "per_layer_model_projection"),
        ("per_layer_proj_norm", "per_layer_projection_norm"),
    ],
    inner: &[
        ("inp_gate", "per_layer_input_gate"),
        ("proj", "per_layer_projection"),
        ("post_norm", "post_per_layer_input_norm"),
        ("layer_output_scale", "layer_scalar"),
    ],
    base: Some(&gemma3::GGUF),
    ..gemma3::GGUF
};
