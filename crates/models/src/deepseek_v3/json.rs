//! Reads and writes [`Config`] in `config.json`.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::Config;
use crate::{
    error::{Error, Result},
    family::ConfigJson,
    fields::{layers, required},
    moe::Scores,
    nn::RopeScaling,
    rope_config::{self, RopeFields},
};

#[derive(Deserialize)]
struct Raw {
    model_type: String,
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_nextn_predict_layers: Option<usize>,
    num_mtp_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    q_lora_rank: Option<usize>,
    kv_lora_rank: Option<usize>,
    qk_nope_head_dim: Option<usize>,
    qk_rope_head_dim: Option<usize>,
    v_head_dim: Option<usize>,
    rope_interleave: Option<bool>,
    first_k_dense_replace: Option<usize>,
    moe_layer_freq: Option<usize>,
    n_routed_experts: Option<usize>,
    num_local_experts: Option<usize>,
    n_shared_experts: Option<usize>,
    moe_intermediate_size: Option<usize>,
    num_experts_per_tok: Option<usize>,
    n_group: Option<usize>,
    topk_group: Option<usize>,
    topk_method: Option<String>,
    scoring_func: Option<String>,
    norm_topk_prob: Option<bool>,
    routed_scaling_factor: Option<f64>,
    max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f64>,
    hidden_act: Option<String>,
    attention_bias: Option<bool>,
    tie_word_embeddings: Option<bool>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeFields>,
    rope_parameters: Option<RopeFields>,
}

const V2: &str = "deepseek_v2";
/// The selection by sigmoids with a bias, by groups of probabilities, and without groups.
const NOAUX: &str = "noaux_tc";
const LIMITED: &str = "group_limited_greedy";
const GREEDY: &str = "greedy";
/// The defaults of the transformers library.
const EPSILON: f64 = 1e-6;
const THETA: f64 = 10_000.0;

impl Raw {
    /// Refuses features that no published model has.
    fn check_features(&self, path: &Path) -> Result<()> {
        if let Some(act) = self.hidden_act.as_deref().filter(|act| *act != "silu") {
            return Err(Error::config(path, "hidden_act", act, "must be silu"));
        }
        if self.attention_bias == Some(true) {
            return Err(Error::config(path, "attention_bias", true, "must be false"));
        }
        if let Some(every) = self.moe_layer_freq.filter(|every| *every != 1) {
            return Err(Error::config(path, "moe_layer_freq", every, "must be 1"));
        }
        match (self.num_key_value_heads, self.num_attention_heads) {
            (Some(keys), Some(heads)) if keys != heads => {
                let rule = format!("must be num_attention_heads {heads}");
                Err(Error::config(path, "num_key_value_heads", keys, rule))
            }
            _ => Ok(()),
        }
    }

    fn scores(&self, path: &Path) -> Result<Scores> {
        let default = if self.model_type == V2 { SOFTMAX } else { SIGMOID };
        match self.scoring_func.as_deref().unwrap_or(default) {
            SOFTMAX => Ok(Scores::Softmax),
            SIGMOID => Ok(Scores::Sigmoid),
            other => {
                let rule = format!("must be {SIGMOID} or {SOFTMAX}");
                Err(Error::config(path, "scoring_func", other, rule))
            }
        }
    }

    /// Returns the groups of experts, and how many a token selects. The method must be the one of
    /// the scores.
    fn groups(&self, path: &Path, scores: Scores) -> Result<[usize; 2]> {
        let of_scores: &[&str] = match scores {
            Scores::Sigmoid => &[NOAUX],
            _ => &[LIMITED, GREEDY],
        };
        let default = if self.model_type == V2 { GREEDY } else { NOAUX };
        match self.topk_method.as_deref().unwrap_or(default) {
            GREEDY if of_scores.contains(&GREEDY) => return Ok([1, 1]),
            method if !of_scores.contains(&method) => {
                let of = if scores == Scores::Sigmoid { SIGMOID } else { SOFTMAX };
                let rule = format!("must be {} with scoring_func {of}", of_scores.join(" or "));
                return Err(Error::config(path, "topk_method", method, rule));
            }
            _ => {}
        }
        let size = |field: &str, value| required(path, field, value);
        Ok([size("n_group", self.n_group)?, size("topk_group", self.topk_group)?])
    }
}

const SIGMOID: &str = "sigmoid";
const SOFTMAX: &str = "softmax";

impl Config {
    pub(super) fn from_json(json: &ConfigJson<'_>) -> Result<Self> {
        let (raw, path) = (json.parse::<Raw>()?, json.path);
        raw.check_features(path)?;
        // A model without compressed queries has `null`.
        if !json.parse::<Map<String, Value>>()?.contains_key("q_lora_rank") {
            let rule = "the model needs it; set it to null for queries that are not compressed";
            return Err(Error::config(path, "q_lora_rank", "missing", rule));
        }
        let size = |field: &str, value| required(path, field, value);
        let n_layers = size("num_hidden_layers", raw.num_hidden_layers)?;
        let max_positions = size("max_position_embeddings", raw.max_position_embeddings)?;
        let new_rope = raw.rope_parameters.as_ref();
        let rope = new_rope.or(raw.rope_scaling.as_ref());
        let rope_theta = new_rope.and_then(|rope| rope.rope_theta).or(raw.rope_theta);
        let scores = raw.scores(path)?;
        let [n_groups, groups_per_token] = raw.groups(path, scores)?;
        let n_experts = raw.n_routed_experts.or(raw.num_local_experts);
        Ok(Self {
            vocab_size: size("vocab_size", raw.vocab_size)?,
            hidden_size: size("hidden_size", raw.hidden_size)?,
            intermediate_size: size("intermediate_size", raw.intermediate_size)?,
            n_layers: layers(path, "num_hidden_layers", n_layers)?,
            further_layers: raw.num_nextn_predict_layers.or(raw.num_mtp_layers).unwrap_or(0),
            n_heads: size("num_attention_heads", raw.num_attention_heads)?,
            query_rank: raw.q_lora_rank,
            latent_rank: size("kv_lora_rank", raw.kv_lora_rank)?,
            plain_dim: size("qk_nope_head_dim", raw.qk_nope_head_dim)?,
            rotary_dim: size("qk_rope_head_dim", raw.qk_rope_head_dim)?,
            value_dim: size("v_head_dim", raw.v_head_dim)?,
            interleaved: raw.rope_interleave.unwrap_or(true),
            dense_layers: size("first_k_dense_replace", raw.first_k_dense_replace)?,
            n_experts: size("n_routed_experts", n_experts)?,
            expert_size: size("moe_intermediate_size", raw.moe_intermediate_size)?,
            shared_experts: size("n_shared_experts", raw.n_shared_experts)?,
            experts_per_token: size("num_experts_per_tok", raw.num_experts_per_tok)?,
            scores,
            n_groups,
            groups_per_token,
            normalized: raw.norm_topk_prob.unwrap_or(raw.model_type != V2),
            routed_scale: required(path, "routed_scaling_factor", raw.routed_scaling_factor)?,
            max_positions,
            norm_epsilon: raw.rms_norm_eps.unwrap_or(EPSILON),
            tied_head: raw.tie_word_embeddings.unwrap_or(false),
            rope_theta: rope_theta.unwrap_or(THETA),
            rope_scaling: match rope {
                Some(rope) => rope.scaling(path, max_positions, None)?,
                None => RopeScaling::Default,
            },
            score_mscale: rope.and_then(|rope| rope.mscale_all_dim).unwrap_or(0.0),
        })
    }

    /// Returns the fields that [`from_json`](Self::from_json) reads.
    pub(super) fn fields(&self) -> Map<String, Value> {
        let sigmoid = self.scores == Scores::Sigmoid;
        let (model_type, architecture, method) = match sigmoid {
            true => ("deepseek_v3", "DeepseekV3ForCausalLM", NOAUX),
            false if self.n_groups > 1 => (V2, "DeepseekV2ForCausalLM", LIMITED),
            false => (V2, "DeepseekV2ForCausalLM", GREEDY),
        };
        let mut rope = rope_config::to_json(&self.rope_scaling, self.max_positions);
        if let Value::Object(rope) = &mut rope
            && self.score_mscale > 0.0
        {
            rope.insert("mscale_all_dim".into(), json!(self.score_mscale));
            // Software that does not know `attention_factor` divides by this.
            if let RopeScaling::Yarn { attention_factor: 1.0, .. } = self.rope_scaling {
                rope.insert("mscale".into(), json!(self.score_mscale));
            }
        }
        let more = json!({
            "architectures": [architecture],
            "model_type": model_type,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": self.query_rank,
            "qk_head_dim": self.head_dim(),
            "head_dim": self.rotary_dim,
            "rope_interleave": self.interleaved,
            "first_k_dense_replace": self.dense_layers,
            "moe_layer_freq": 1,
            "n_shared_experts": self.shared_experts,
            "scoring_func": if sigmoid { SIGMOID } else { SOFTMAX },
            "topk_method": method,
            "norm_topk_prob": self.normalized,
            "routed_scaling_factor": self.routed_scale,
            "rms_norm_eps": self.norm_epsilon,
            "hidden_act": "silu",
            "attention_bias": false,
            "tie_word_embeddings": self.tied_head,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope,
        });
        let sizes = self.sizes().map(|(field, value)| (field.to_string(), json!(value)));
        let mut fields: Map<String, Value> = sizes.into_iter().collect();
        if let Value::Object(more) = more {
            fields.extend(more);
        }
        fields
    }
}
