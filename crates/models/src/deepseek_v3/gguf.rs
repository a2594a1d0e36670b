//! Reads [`Config`] from the metadata of a GGUF file.

use super::Config;
use crate::{
    checkpoint::Weights,
    error::{Error, Result},
    fields,
    gguf::Metadata,
    moe::Scores,
    rope_config,
};

/// Values of `expert_gating_func`. Files of DeepSeek-V2 may lack it.
const SOFTMAX: usize = 1;
const SIGMOID: usize = 2;

impl Config {
    pub(super) fn from_gguf(metadata: &Metadata<'_>, weights: &mut Weights) -> Result<Self> {
        let path = metadata.path();
        let block_count = metadata.size("block_count")?;
        let blocks = fields::layers(path, &metadata.key("block_count"), block_count)?;
        let num_nextn_predict_layers = metadata.optional_size("nextn_predict_layers")?.unwrap_or(0);
        let layers = blocks.checked_sub(num_nextn_predict_layers).filter(|&n| n > 0);
        let Some(num_hidden_layers) = layers else {
            let rule = format!("must be below block_count {blocks}");
            let key = metadata.key("nextn_predict_layers");
            return Err(Error::config(path, key, num_nextn_predict_layers, rule));
        };
        let max_positions = metadata.size("context_length")?;
        let rotary_dim = metadata.size("rope.dimension_count")?;
        // Older files have the channels of a head under the names that are now those of the cache.
        let channels = |side: &str| -> Result<usize> {
            let of_head = metadata.optional_size(&format!("attention.{side}_length_mla"))?;
            of_head.map_or_else(|| metadata.size(&format!("attention.{side}_length")), Ok)
        };
        let head_dim = channels("key")?;
        let Some(qk_nope_head_dim) = head_dim.checked_sub(rotary_dim).filter(|&n| n > 0) else {
            let key = metadata.key("rope.dimension_count");
            let rule = format!("must be below the {head_dim} channels of a head");
            return Err(Error::config(path, key, rotary_dim, rule));
        };
        let rope_theta = metadata.float("rope.freq_base")?.unwrap_or(10_000.0);
        let rope_scaling =
            rope_config::from_gguf(metadata, rotary_dim, rope_theta, max_positions, weights)?;
        let (scores, n_groups) = (scores(metadata)?, metadata.optional_size("expert_group_count")?);
        if scores == Scores::Sigmoid && n_groups.is_none() {
            let note = "the file has no expert_group_count, so experts of all groups compete";
            weights.notes().push(format!("{}: {note}", path.display()));
        }
        let dense_layers = metadata.optional_size("leading_dense_block_count")?;
        Ok(Self {
            vocab_size: weights.rows("embed_tokens.weight")?,
            hidden_size: metadata.size("embedding_length")?,
            intermediate_size: metadata.size("feed_forward_length")?,
            num_hidden_layers,
            num_nextn_predict_layers,
            num_attention_heads: metadata.size("attention.head_count")?,
            q_lora_rank: metadata.optional_size("attention.q_lora_rank")?,
            kv_lora_rank: metadata.size("attention.kv_lora_rank")?,
            qk_nope_head_dim,
            qk_rope_head_dim: rotary_dim,
            v_head_dim: channels("value")?,
            rope_interleave: true,
            first_k_dense_replace: dense_layers.unwrap_or(0),
            n_routed_experts: metadata.size("expert_count")?,
            moe_intermediate_size: metadata.size("expert_feed_forward_length")?,
            n_shared_experts: metadata.optional_size("expert_shared_count")?.unwrap_or(0),
            num_experts_per_tok: metadata.size("expert_used_count")?,
            scoring_func: scores,
            n_group: n_groups.unwrap_or(1),
            topk_group: metadata.optional_size("expert_group_used_count")?.unwrap_or(1),
            norm_topk_prob: metadata.flag("expert_weights_norm")?.unwrap_or(false),
            routed_scaling_factor: metadata.float("expert_weights_scale")?.unwrap_or(1.0),
            max_position_embeddings: max_positions,
            rms_norm_eps: metadata.float("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-6),
            tie_word_embeddings: !weights.contains("lm_head.weight"),
            rope_theta,
            rope_scaling,
        })
    }
}

fn scores(metadata: &Metadata<'_>) -> Result<Scores> {
    let field = "expert_gating_func";
    match metadata.optional_size(field)?.unwrap_or(SOFTMAX) {
        SOFTMAX => Ok(Scores::Softmax),
        SIGMOID => Ok(Scores::Sigmoid),
        other => {
            let rule = format!("must be {SOFTMAX} (softmax) or {SIGMOID} (sigmoid)");
            Err(Error::config(metadata.path(), metadata.key(field), other, rule))
        }
    }
}
