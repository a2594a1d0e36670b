//! The tensor names of the Llama family.

use super::Config;
use crate::{gguf::GgufNames, spec::LayerSpec, stack::gguf_names};

/// A projection: its modules with their numbers of rows.
pub(crate) type Parts = Vec<(&'static str, usize)>;

/// Returns the query, key and value projection, then the gate and up projection. `is_fused` returns
/// whether a projection is a single module, as in Phi-3, whose checkpoints have the same rows in
/// the same order.
pub(crate) fn fused(config: &Config, is_fused: impl Fn(&str) -> bool) -> [Parts; 2] {
    let LayerSpec { n_heads, n_kv_heads, .. } = config.attention;
    let (head_dim, wide) = (config.head_dim(), config.intermediate_size);
    let (q_rows, kv_rows) = (n_heads * head_dim, n_kv_heads * head_dim);
    let parts = |fused: &'static str, parts: Parts| match is_fused(fused) {
        true => vec![(fused, parts.iter().map(|(_, rows)| rows).sum())],
        false => parts,
    };
    let [q, k, v] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
    [
        parts("self_attn.qkv_proj", vec![(q, q_rows), (k, kv_rows), (v, kv_rows)]),
        parts("mlp.gate_up_proj", vec![("mlp.gate_proj", wide), ("mlp.up_proj", wide)]),
    ]
}

/// Phi-3 stores its gate in the rows of `ffn_up`.
pub(super) const GGUF_PHI3: GgufNames = gguf_names(&[("ffn_up", "mlp.gate_up_proj")]);
