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

/// The GGUF names of the tensors outside the layers, for families that use [`LLAMA_NAMES`].
pub(crate) const LLAMA_GGUF: GgufNames = GgufNames {
    layer: ("blk.", "layers."),
    outer: &[("token_embd", "embed_tokens"), ("output_norm", "norm"), ("output", "lm_head")],
    inner: &[],
};
