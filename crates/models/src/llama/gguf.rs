//! Reads [`Config`] from the metadata of a GGUF file.

use std::collections::BTreeSet;

use super::Config;
use crate::{
    checkpoint::Weights, error::Result, fields, gguf::Metadata, rope_config, spec::LayerSpec,
    stack::DecoderConfig,
};

/// Every fourth layer of SmolLM3 has no rope, which its GGUF files do not contain.
const SMOLLM3_INTERVAL: usize = 4;

impl Config {
    /// Reads the metadata of a GGUF file. Takes the tensors of the rope out of `weights` and adds
    /// to its notes.
    pub(super) fn from_gguf(metadata: &Metadata<'_>, weights: &mut Weights) -> Result<Self> {
        let path = metadata.path();
        let hidden_size = metadata.size("embedding_length")?;
        let n_heads = metadata.size("attention.head_count")?;
        let n_kv_heads = metadata.optional_size("attention.head_count_kv")?.unwrap_or(n_heads);
        let context_length = metadata.size("context_length")?;
        let head_dim = match metadata.optional_size("attention.key_length")? {
            Some(head_dim) => head_dim,
            None => {
                let width = (&*metadata.key("embedding_length"), hidden_size);
                fields::head_dim(path, width, ("attention.head_count", n_heads))?
            }
        };
        // llama.cpp writes 0 for no sliding window. A window as long as the context hides nothing.
        let window = metadata.optional_size("attention.sliding_window")?;
        let window = window.filter(|&n| n > 0 && n < context_length);
        let block_count = metadata.size("block_count")?;
        let n_layers = fields::layers(path, &metadata.key("block_count"), block_count)?;
        let mut layers_without_rope = BTreeSet::new();
        if metadata.arch() == "smollm3" {
            let last = SMOLLM3_INTERVAL - 1;
            layers_without_rope = (last..n_layers).step_by(SMOLLM3_INTERVAL).collect();
        }
        let rotary_dim = metadata.optional_size("rope.dimension_count")?.unwrap_or(head_dim);
        let rope_theta = metadata.float("rope.freq_base")?.unwrap_or(10_000.0);
        let epsilon = metadata.float("attention.layer_norm_rms_epsilon")?;
        let config = Self {
            vocab_size: weights.rows("embed_tokens.weight")?,
            hidden_size,
            intermediate_size: metadata.size("feed_forward_length")?,
            n_layers,
            attention: LayerSpec::new(n_heads, n_kv_heads, head_dim).with_sliding_window(window),
            full_layers: BTreeSet::new(),
            layers_without_rope,
            qk_norms: weights.contains("layers.0.self_attn.q_norm.weight"),
            max_positions: context_length,
            norm_epsilon: epsilon.unwrap_or(1e-5),
            qkv_bias: weights.contains("layers.0.self_attn.q_proj.bias")
                || weights.contains("layers.0.self_attn.qkv_proj.bias"),
            output_bias: weights.contains("layers.0.self_attn.o_proj.bias"),
            mlp_bias: weights.contains("layers.0.mlp.down_proj.bias"),
            tied_head: !weights.contains("lm_head.weight"),
            rotary_dim,
            rope_theta,
            rope_scaling: rope_config::from_gguf(
                metadata,
                rotary_dim,
                rope_theta,
                context_length,
                weights,
            )?,
        };
        config.check(path)?;
        rope_config::note_longrope(path, &config.rope_scaling, context_length, weights.notes());
        if matches!(metadata.arch(), "llama" | "smollm3") {
            config.interleaved(weights);
        }
        Ok(config)
    }

    /// Marks queries and keys as stored for interleaved rope, as in GGUF files of architecture
    /// `llama`. This crate applies rope to halves.
    fn interleaved(&self, weights: &mut Weights) {
        let LayerSpec { n_heads, n_kv_heads, .. } = self.attention;
        let head_dim = self.head_dim();
        for i in 0..self.n_layers {
            for (part, heads) in [("q_proj", n_heads), ("k_proj", n_kv_heads)] {
                for kind in ["weight", "bias"] {
                    let name = format!("layers.{i}.self_attn.{part}.{kind}");
                    weights.interleaved(&name, heads * head_dim, head_dim);
                }
            }
        }
    }
}
