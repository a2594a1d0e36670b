//! Reads and writes [`Config`] in `config.json`.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use super::Config;
use crate::{
    error::{Error, Result},
    family::{ConfigJson, JsonFields},
    fields::extended,
    moe::Scores,
    rope_config::{self, RopeFields},
};

const V2: &str = "deepseek_v2";
/// The selection of experts by sigmoids with a bias.
const NOAUX: &str = "noaux_tc";
/// The selections by probabilities, in groups and without groups.
const LIMITED: &str = "group_limited_greedy";
const GREEDY: &str = "greedy";

#[derive(Deserialize)]
struct Raw {
    model_type: String,
    topk_method: Option<String>,
    num_mtp_layers: Option<usize>,
    num_local_experts: Option<usize>,
    rope_scaling: Option<RopeFields>,
    rope_parameters: Option<RopeFields>,
}

impl Config {
    pub(super) fn from_json(json: &ConfigJson<'_>) -> Result<Self> {
        let (raw, path) = (json.parse::<Raw>()?, json.path);
        json.check_only([
            ("hidden_act", json!("silu")),
            ("attention_bias", json!(false)),
            ("moe_layer_freq", json!(1)),
        ])?;
        // A model without compressed queries has `null`.
        let mut fields: JsonFields = json.parse()?;
        if !fields.contains_key("q_lora_rank") {
            let rule = "the model needs it; set it to null for queries that are not compressed";
            return Err(Error::config(path, "q_lora_rank", "missing", rule));
        }
        let is_v2 = raw.model_type == V2;
        let method = raw.topk_method.as_deref().unwrap_or(if is_v2 { GREEDY } else { NOAUX });
        let rope = raw.rope_parameters.or(raw.rope_scaling).unwrap_or_default();
        let mut defaults = json!({
            "num_nextn_predict_layers": raw.num_mtp_layers.unwrap_or(0),
            "rope_interleave": true,
            "scoring_func": if is_v2 { Scores::Softmax } else { Scores::Sigmoid },
            "norm_topk_prob": !is_v2,
            // The defaults of the transformers library.
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": false,
            "rope_theta": 1e4,
        });
        if let Some(n_experts) = raw.num_local_experts {
            defaults["n_routed_experts"] = json!(n_experts);
        }
        if method == GREEDY {
            fields = extended(fields, json!({"n_group": 1, "topk_group": 1}));
        }
        let text = Value::Object(fields).to_string();
        let mut config: Self = ConfigJson { text: &text, path }.parse_with(defaults)?;
        // Checked before the sizes, whose sum may overflow.
        let head_dim = config.qk_nope_head_dim.saturating_add(config.qk_rope_head_dim);
        json.check_only([
            ("num_key_value_heads", json!(config.num_attention_heads)),
            ("qk_head_dim", json!(head_dim)),
        ])?;
        let (scores, methods): (_, &[&str]) = match config.scoring_func {
            Scores::Sigmoid => ("sigmoid", &[NOAUX]),
            _ => ("softmax", &[LIMITED, GREEDY]),
        };
        if !methods.contains(&method) {
            let rule = format!("must be {} with scoring_func {scores}", methods.join(" or "));
            return Err(Error::config(path, "topk_method", method, rule));
        }
        config.rope_theta = rope.rope_theta.unwrap_or(config.rope_theta);
        config.rope_scaling = rope.scaling(path, config.max_position_embeddings, None)?;
        Ok(config)
    }

    /// Returns the fields that [`from_json`](Self::from_json) reads.
    pub(super) fn fields(&self, path: &Path) -> Result<JsonFields> {
        let (model_type, architecture, method) = match self.scoring_func {
            Scores::Sigmoid => ("deepseek_v3", "DeepseekV3ForCausalLM", NOAUX),
            _ if self.n_group > 1 => (V2, "DeepseekV2ForCausalLM", LIMITED),
            _ => (V2, "DeepseekV2ForCausalLM", GREEDY),
        };
        let fields = ConfigJson::fields(self, path, model_type, architecture)?;
        let more = json!({
            "num_nextn_predict_layers": 0,
            "num_key_value_heads": self.num_attention_heads,
            "qk_head_dim": self.head_dim(),
            "head_dim": self.qk_rope_head_dim,
            "moe_layer_freq": 1,
            "topk_method": method,
            "hidden_act": "silu",
            "attention_bias": false,
            "rope_scaling": rope_config::to_json(&self.rope_scaling, self.max_position_embeddings),
        });
        Ok(extended(fields, more))
    }
}
