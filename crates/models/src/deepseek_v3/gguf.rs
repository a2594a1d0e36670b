//! Reads [`Config`] from the metadata of a GGUF file.

use super::Config;
use crate::{
    checkpoint::Weights,
    error::{Error, Result},
    fields,
    gguf::Metadata,
    moe::Scores,
    nn::RopeScaling,
    rope_config,
};

/// Values of `expert_gating_func`. Files of DeepSeek-V2 may lack it.
const SOFTMAX: usize = 1;
const SIGMOID: usize = 2;
/// The factor of `mscale_all_dim` in files.
const LOG_MULTIPLIER: f64 = 0.1;

impl Config {
    pub(super) fn from_gguf(metadata: &Metadata<'_>, weights: &mut Weights) -> Result<Self> {
        let path = metadata.path();
        let block_count = metadata.size("block_count")?;
        let blocks = fields::layers(path, &metadata.key("block_count"), block_count)?;
        let further_layers = metadata.optional_size("nextn_predict_layers")?.unwrap_or(0);
        let Some(n_layers) = blocks.checked_sub(further_layers).filter(|&n| n > 0) else {
            let rule = format!("must be below block_count {blocks}");
            let key = metadata.key("nextn_predict_layers");
            return Err(Error::config(path, key, further_layers, rule));
        };
        let max_positions = metadata.size("context_length")?;
        let rotary_dim = metadata.size("rope.dimension_count")?;
        // Older files have the channels of a head under the names that are now those of the cache.
        let channels = |side: &str| -> Result<usize> {
            let of_head = metadata.optional_size(&format!("attention.{side}_length_mla"))?;
            of_head.map_or_else(|| metadata.size(&format!("attention.{side}_length")), Ok)
        };
        let head_dim = channels("key")?;
        let Some(plain_dim) = head_dim.checked_sub(rotary_dim).filter(|&n| n > 0) else {
            let key = metadata.key("rope.dimension_count");
            let rule = format!("must be below the {head_dim} channels of a head");
            return Err(Error::config(path, key, rotary_dim, rule));
        };
        let rope_theta = metadata.float("rope.freq_base")?.unwrap_or(10_000.0);
        let mut rope_scaling =
            rope_config::from_gguf(metadata, rotary_dim, rope_theta, max_positions, weights)?;
        let multiplier = metadata.float("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0);
        if let RopeScaling::Yarn { attention_factor, .. } = &mut rope_scaling
            && multiplier > 0.0
        {
            // Scores grow instead of sines and cosines. Like llama.cpp, this assumes that `mscale`
            // is `mscale_all_dim`, because files have only the latter.
            *attention_factor = metadata.float("rope.scaling.attn_factor")?.unwrap_or(1.0);
        }
        let (scores, n_groups) = (scores(metadata)?, metadata.optional_size("expert_group_count")?);
        if scores == Scores::Sigmoid && n_groups.is_none() {
            let note = "the file has no expert_group_count, so experts of all groups compete";
            weights.notes().push(format!("{}: {note}", path.display()));
        }
        Ok(Self {
            vocab_size: weights.rows("embed_tokens.weight")?,
            hidden_size: metadata.size("embedding_length")?,
            intermediate_size: metadata.size("feed_forward_length")?,
            n_layers,
            further_layers,
            n_heads: metadata.size("attention.head_count")?,
            query_rank: metadata.optional_size("attention.q_lora_rank")?,
            latent_rank: metadata.size("attention.kv_lora_rank")?,
            plain_dim,
            rotary_dim,
            value_dim: channels("value")?,
            interleaved: true,
            dense_layers: metadata.optional_size("leading_dense_block_count")?.unwrap_or(0),
            n_experts: metadata.size("expert_count")?,
            expert_size: metadata.size("expert_feed_forward_length")?,
            shared_experts: metadata.optional_size("expert_shared_count")?.unwrap_or(0),
            experts_per_token: metadata.size("expert_used_count")?,
            scores,
            n_groups: n_groups.unwrap_or(1),
            groups_per_token: metadata.optional_size("expert_group_used_count")?.unwrap_or(1),
            normalized: metadata.flag("expert_weights_norm")?.unwrap_or(false),
            routed_scale: metadata.float("expert_weights_scale")?.unwrap_or(1.0),
            max_positions,
            norm_epsilon: metadata.float("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-6),
            tied_head: !weights.contains("lm_head.weight"),
            rope_theta,
            rope_scaling,
            // Files have f32, in which 0.1 is not exact.
            score_mscale: f64::from((multiplier / LOG_MULTIPLIER) as f32),
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
