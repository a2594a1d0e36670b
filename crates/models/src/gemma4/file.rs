//! The configuration of Gemma 4 in `config.json` and GGUF files.

use std::{collections::BTreeMap, path::Path};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::Config;
use crate::{
    checkpoint::Weights,
    error::{Error, Result},
    family::ConfigJson,
    gguf::Metadata,
    nn::RopeScaling,
    rope_config,
    stack::{Defaults, RopeByKind, SlidingConfig},
};

/// The published models. Every sixth layer sees all tokens.
const DEFAULTS: Defaults = Defaults {
    pattern: 6,
    reads_pattern: false,
    norm_epsilon: 1e-6,
    attention_bias: false,
    tied_head: true,
    rope_theta: 1e6,
};
const LOCAL_THETA: f64 = 1e4;

#[derive(Deserialize)]
struct Raw {
    final_logit_softcapping: Option<f64>,
    use_bidirectional_attention: Option<String>,
    #[serde(default = "default_inputs")]
    hidden_size_per_layer_input: Option<usize>,
    attention_k_eq_v: Option<bool>,
    num_kv_shared_layers: Option<usize>,
    use_double_wide_mlp: Option<bool>,
    global_head_dim: Option<usize>,
    num_global_key_value_heads: Option<usize>,
    /// Fields by the number of a layer. Older files have the two fields above.
    per_layer_config: Option<BTreeMap<String, Override>>,
    rope_parameters: Option<RopeByKind>,
}

fn default_inputs() -> Option<usize> {
    Some(256)
}

/// The sizes of one layer that differ from those of the model.
#[derive(Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Override {
    head_dim: Option<usize>,
    num_key_value_heads: Option<usize>,
}

impl Raw {
    /// Returns channels and key heads of layers that see all tokens.
    fn global_heads(&self, path: &Path, shared: &SlidingConfig) -> Result<[usize; 2]> {
        let of_model = [shared.head_dim, shared.n_kv_heads];
        let Some(layers) = &self.per_layer_config else {
            let equal = self.attention_k_eq_v == Some(true);
            let kv_heads = self.num_global_key_value_heads.filter(|_| equal).unwrap_or(of_model[1]);
            return Ok([self.global_head_dim.unwrap_or(512), kv_heads]);
        };
        let n_layers = shared.n_layers;
        let known = |name: &str| (0..n_layers).any(|layer| layer.to_string() == name);
        if let Some(name) = layers.keys().find(|name| !known(name)) {
            let rule = format!("must be the number of a layer, from 0 to {}", n_layers - 1);
            return Err(Error::config(path, "key of per_layer_config", name, rule));
        }
        let sizes = |layer: &usize| {
            let Override { head_dim, num_key_value_heads } =
                layers.get(&layer.to_string()).copied().unwrap_or_default();
            [head_dim.unwrap_or(of_model[0]), num_key_value_heads.unwrap_or(of_model[1])]
        };
        let global = shared.full_layers.first().map_or(of_model, sizes);
        for layer in 0..n_layers {
            let (found, expected) = match shared.full_layers.contains(&layer) {
                true => (sizes(&layer), global),
                false => (sizes(&layer), of_model),
            };
            if found != expected {
                let [head_dim, kv_heads] = found;
                let why = format!(
                    "{} gives layer {layer} head_dim {head_dim} and num_key_value_heads \
                     {kv_heads}; layers of one kind must be alike, and those with a sliding window \
                     like the model",
                    path.display()
                );
                return Err(Error::unsupported("per_layer_config", why));
            }
        }
        if let Some(n) = self.global_head_dim.filter(|n| *n != global[0]) {
            let rule = format!("per_layer_config has head_dim {}; remove one", global[0]);
            return Err(Error::config(path, "global_head_dim", n, rule));
        }
        Ok(global)
    }
}

impl Config {
    pub(super) fn from_json(json: &ConfigJson<'_>) -> Result<Self> {
        let (raw, path) = (json.parse::<Raw>()?, json.path);
        let mut shared = SlidingConfig::from_json(json, &DEFAULTS)?;
        json.check_only([
            ("hidden_activation", json!("gelu_pytorch_tanh")),
            ("enable_moe_block", json!(false)),
        ])?;
        if raw.use_bidirectional_attention.as_deref() == Some("all") {
            let why = format!("{} has use_bidirectional_attention all", path.display());
            return Err(Error::unsupported("attention to later tokens", why));
        }
        let per_layer_inputs = raw.hidden_size_per_layer_input.unwrap_or(0);
        if per_layer_inputs > 0 {
            json.check_only([("vocab_size_per_layer_input", json!(shared.vocab_size))])?;
        }
        if !shared.full_layers.contains(&(shared.n_layers - 1)) {
            let rule = "must be full_attention; transformers changes it without an error";
            return Err(Error::config(path, "last of layer_types", "sliding_attention", rule));
        }
        let [global_head_dim, global_kv_heads] = raw.global_heads(path, &shared)?;
        let mut local_rope_theta = LOCAL_THETA;
        let mut global_rope = RopeScaling::Proportional { share: 0.25, factor: 1.0 };
        if let Some(ropes) = &raw.rope_parameters {
            let full = &ropes.full_attention;
            local_rope_theta =
                ropes.local_theta(path, shared.max_positions)?.unwrap_or(LOCAL_THETA);
            global_rope = full.scaling_of_head(path, shared.max_positions)?;
            shared.rope_theta = full.rope_theta.unwrap_or(DEFAULTS.rope_theta);
        }
        Ok(Self {
            global_head_dim,
            global_kv_heads,
            global_rope,
            local_rope_theta,
            keys_are_values: raw.attention_k_eq_v.unwrap_or(false),
            shared_layers: raw.num_kv_shared_layers.unwrap_or(0),
            double_wide: raw.use_double_wide_mlp.unwrap_or(false),
            per_layer_inputs,
            logit_softcap: raw.final_logit_softcapping,
            shared,
        })
    }

    pub(super) fn from_gguf(metadata: &Metadata<'_>, weights: &mut Weights) -> Result<Self> {
        let path = metadata.path();
        // The sizes that differ by layer may be arrays; tensors have them, too.
        let width = weights.rows("layers.0.mlp.gate_proj.weight")?;
        let mut shared = SlidingConfig::from_gguf(metadata, weights, width, Some(1), &DEFAULTS)?;
        let n_layers = shared.n_layers;
        let slides = metadata.flags("attention.sliding_window_pattern", n_layers)?;
        shared.full_layers = (0..n_layers).filter(|&i| !slides[i]).collect();
        let global_head_dim = shared.head_dim;
        shared.head_dim = metadata.size("attention.key_length_swa")?;
        for key in ["rope.dimension_count_swa", "attention.value_length_swa"] {
            metadata.agrees(key, shared.head_dim, "the attention.key_length_swa")?;
        }
        let global_rope = std::mem::replace(&mut shared.rope_scaling, RopeScaling::Default);

        let shared_layers = metadata.optional_size("attention.shared_kv_layers")?.unwrap_or(0);
        let kv_heads = |layer: Option<usize>, head_dim: usize| match layer {
            Some(i) => {
                let rows = weights.rows(&format!("layers.{i}.self_attn.k_proj.weight"))?;
                Ok::<_, Error>((rows / head_dim.max(1)).max(1))
            }
            None => Ok(1),
        };
        let global = (0..n_layers).find(|&i| !slides[i]);
        shared.n_kv_heads = kv_heads((0..n_layers).find(|&i| slides[i]), shared.head_dim)?;
        let global_kv_heads = kv_heads(global, global_head_dim)?;
        let values = global.map(|i| format!("layers.{i}.self_attn.v_proj.weight"));
        let last = weights.rows(&format!("layers.{}.mlp.gate_proj.weight", n_layers - 1))?;
        if metadata.optional_size("expert_count")?.is_some_and(|n| n > 0) {
            let why = format!("{} has expert_count above 0", path.display());
            return Err(Error::unsupported("experts in Gemma 4", why));
        }
        let inputs = metadata.optional_size("embedding_length_per_layer_input")?;
        Ok(Self {
            global_head_dim,
            global_kv_heads,
            global_rope,
            local_rope_theta: metadata.float("rope.freq_base_swa")?.unwrap_or(LOCAL_THETA),
            keys_are_values: values.is_some_and(|name| !weights.contains(&name)),
            shared_layers,
            double_wide: shared_layers > 0 && last == 2 * shared.intermediate_size,
            per_layer_inputs: inputs.unwrap_or(0),
            logit_softcap: metadata.float("final_logit_softcapping")?,
            shared,
        })
    }

    /// Returns the fields that [`from_json`](Self::from_json) reads, as old and new versions of
    /// transformers write them.
    pub(super) fn fields(&self) -> Map<String, Value> {
        let Self { shared, global_head_dim, global_kv_heads, .. } = self;
        let of_layer = json!({"head_dim": global_head_dim, "num_key_value_heads": global_kv_heads});
        let layers: Map<String, Value> =
            shared.full_layers.iter().map(|i| (i.to_string(), of_layer.clone())).collect();
        let mut full = match rope_config::to_json(&self.global_rope, shared.max_positions) {
            Value::Object(fields) => fields,
            _ => Map::from_iter([("rope_type".to_string(), json!("default"))]),
        };
        full.insert("rope_theta".into(), json!(shared.rope_theta));
        let local = json!({"rope_type": "default", "rope_theta": self.local_rope_theta});
        let mut fields = shared.to_json(json!({
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": self.logit_softcap,
            "vocab_size_per_layer_input": shared.vocab_size,
            "hidden_size_per_layer_input": self.per_layer_inputs,
            "attention_k_eq_v": self.keys_are_values,
            "num_kv_shared_layers": self.shared_layers,
            "enable_moe_block": false,
            "use_double_wide_mlp": self.double_wide,
            "global_head_dim": global_head_dim,
            "num_global_key_value_heads": global_kv_heads,
            "per_layer_config": layers,
            "rope_parameters": {"full_attention": full, "sliding_attention": local},
        }));
        fields.remove("rope_theta");
        fields.remove("rope_scaling");
        fields
    }
}
