//! The tensor names of DeepSeek-V4.

use crate::{checkpoint::Names, stack};

pub(super) const NAMES: Names = Names {
    family: "DeepSeek-V4",
    head: "head.weight",
    // DeepSeek's files have the first of each pair, and transformers writes the second.
    aliases: &[
        ("embed.weight", "embed_tokens.weight"),
        ("hc_head_fn", "hc_head.hc_fn"),
        ("hc_head_base", "hc_head.hc_base"),
        ("hc_head_scale", "hc_head.hc_scale"),
        ("attn.kv_norm.weight", "attn.norm.weight"),
    ],
    // The layers that predict more than one token ahead do not change the logits of the next.
    harmless: |name| name.starts_with("mtp."),
    ..stack::LLAMA_NAMES
};
