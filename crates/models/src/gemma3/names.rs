//! The tensor names of Gemma 3.

use crate::{
    checkpoint::Names,
    gguf::GgufNames,
    stack::{LLAMA_NAMES, gguf_names},
};

pub(super) const NAMES: Names = Names {
    family: "Gemma 3",
    harmless: |name| name.ends_with("rotary_emb.inv_freq"),
    ..LLAMA_NAMES
};

pub(crate) const GGUF: GgufNames = gguf_names(&[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
]);
