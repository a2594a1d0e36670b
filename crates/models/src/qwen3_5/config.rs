//! The configuration of Qwen3.5, read from `config.json` or a GGUF file.

use std::{collections::BTreeSet, path::Path};

use kv_cubecl::{
    Sides,
    delta::{DeltaConfig, HeadOrder},
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::names;
use crate::{
    checkpoint::Weights,
    error::{Error, Result},
    family::ConfigJson,
    fields::{FULL, extended, sizes},
    gguf::{GgufNames, Metadata},
    llama,
    spec::{LayerSpec, ModelSpec},
    stack::DecoderConfig,
};

/// The configuration of a model, with all defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The fields that Qwen3 has, too.
    pub base: llama::Config,
    /// Layers, counted from 0, of attention. The others have linear attention.
    pub attention_layers: BTreeSet<usize>,
    /// The sizes of linear attention.
    pub delta: DeltaConfig,
    /// Pairs of channels whose rope is by time, height and width. A text has one position instead
    /// of three, so this only matters to software that reads a saved model.
    pub rope_sections: Vec<usize>,
}

#[derive(Deserialize)]
struct Raw {
    layer_types: Option<Vec<String>>,
    full_attention_interval: Option<usize>,
    linear_conv_kernel_dim: Option<usize>,
    linear_key_head_dim: Option<usize>,
    linear_value_head_dim: Option<usize>,
    linear_num_key_heads: Option<usize>,
    linear_num_value_heads: Option<usize>,
    rope_parameters: Option<RawRope>,
}

#[derive(Deserialize)]
struct RawRope {
    mrope_section: Option<Vec<usize>>,
}

const LINEAR: &str = "linear_attention";
/// The defaults of the transformers library.
const INTERVAL: usize = 4;
const HEAD_DIM: usize = 256;
const N_KV_HEADS: usize = 4;
const ROTARY_FACTOR: f64 = 0.25;
const ROPE_SECTIONS: [usize; 3] = [11, 11, 10];

impl DecoderConfig for Config {
    const MODEL_TYPES: &'static [&'static str] = &["qwen3_5", "qwen3_5_text"];
    const GGUF: &'static [(&'static str, GgufNames)] = &[("qwen35", names::GGUF)];

    fn read(json: &ConfigJson<'_>, notes: &mut Vec<String>) -> Result<Self> {
        let text = json.text_fields()?;
        let (raw, path) = (ConfigJson { text: &text, ..*json }.parse::<Raw>()?, json.path);
        // The kinds of layers are not Llama's.
        let mut base = ConfigJson { text: &text, ..*json }.parse::<Map<String, Value>>()?;
        base.remove("layer_types");
        for field in ["sliding_window", "use_sliding_window", "max_window_layers"] {
            // As in transformers, which has no such field in this family.
            let ignored = base.remove(field).filter(|_| field == "sliding_window");
            if let Some(window) = ignored.filter(|window| !window.is_null()) {
                notes.push(format!(
                    "{}: sliding_window {window} is ignored; attention of Qwen3.5 has none",
                    path.display()
                ));
            }
        }
        for (field, default) in [("head_dim", HEAD_DIM), ("num_key_value_heads", N_KV_HEADS)] {
            base.entry(field).or_insert(default.into());
        }
        let ropes = ["rope_parameters", "rope_scaling"].map(|field| base.get(field));
        let rope = ropes.into_iter().flatten().find(|rope| rope.is_object()).cloned();
        base.insert("rope_parameters".into(), rope.unwrap_or_else(|| json!({})));
        let factor = base.get("partial_rotary_factor").cloned().unwrap_or(ROTARY_FACTOR.into());
        if let Some(Value::Object(rope)) = base.get_mut("rope_parameters") {
            rope.entry("partial_rotary_factor").or_insert(factor);
        }
        let base = Value::Object(base).to_string();
        let base = llama::Config::read(&ConfigJson { text: &base, ..*json }, notes)?;
        let n_layers = base.n_layers;
        let attention_layers = match &raw.layer_types {
            Some(types) => attention_layers(path, types, n_layers)?,
            None => every(path, raw.full_attention_interval.unwrap_or(INTERVAL), n_layers)?,
        };
        let head_dim = Sides {
            keys: raw.linear_key_head_dim.unwrap_or(128),
            values: raw.linear_value_head_dim.unwrap_or(128),
        };
        let sections = raw.rope_parameters.and_then(|rope| rope.mrope_section);
        if let Some(sections) = &sections
            && !fill(sections, base.rotary_dim)
        {
            let rule = format!(
                "must be 3 numbers with the sum {}, the channel pairs with rope",
                base.rotary_dim / 2
            );
            let field = "rope_parameters.mrope_section";
            return Err(Error::config(path, field, format!("{sections:?}"), rule));
        }
        Ok(Self {
            base: llama::Config { qk_norms: true, ..base },
            attention_layers,
            delta: DeltaConfig::new(
                raw.linear_num_key_heads.unwrap_or(16),
                raw.linear_num_value_heads.unwrap_or(32),
                head_dim,
                raw.linear_conv_kernel_dim.unwrap_or(4),
            ),
            rope_sections: sections.unwrap_or_else(|| ROPE_SECTIONS.to_vec()),
        })
    }

    fn read_gguf(metadata: &Metadata<'_>, weights: &mut Weights) -> Result<Self> {
        let path = metadata.path();
        let mut base = llama::Config::read_gguf(metadata, weights)?;
        base.attention = base.attention.with_sliding_window(None);
        // The last layers predict further tokens, and are not part of the language model.
        let further = metadata.optional_size("nextn_predict_layers")?.unwrap_or(0);
        let n_layers = base.n_layers.saturating_sub(further).max(1);
        for layer in n_layers..base.n_layers {
            let what = "the prediction of several tokens at once";
            weights.forget(&format!("layers.{layer}."), what);
        }
        base.n_layers = n_layers;
        let interval = metadata.optional_size("full_attention_interval")?.unwrap_or(INTERVAL);
        let n_value_heads = metadata.size("ssm.time_step_rank")?;
        let inner = metadata.size("ssm.inner_size")?;
        if n_value_heads == 0 || !inner.is_multiple_of(n_value_heads) {
            let rule = format!("must be a multiple of ssm.time_step_rank {n_value_heads}");
            return Err(Error::config(path, metadata.key("ssm.inner_size"), inner, rule));
        }
        let head_dim =
            Sides { keys: metadata.size("ssm.state_size")?, values: inner / n_value_heads };
        let delta = DeltaConfig::new(
            metadata.size("ssm.group_count")?,
            n_value_heads,
            head_dim,
            metadata.size("ssm.conv_kernel")?,
        );
        let attention_layers = every(path, interval, base.n_layers)?;
        Ok(Self {
            base: llama::Config { qk_norms: true, ..base },
            attention_layers,
            // llama.cpp repeats all key heads, and files have value heads in the order of that.
            delta: match n_value_heads == delta.n_key_heads {
                true => delta,
                false => delta.with_order(HeadOrder::Tiled),
            },
            rope_sections: ROPE_SECTIONS.to_vec(),
        })
    }

    fn check(&self, path: &Path) -> Result<()> {
        let delta = &self.delta;
        self.base.check(path)?;
        let fields = [
            ("linear_num_key_heads", delta.n_key_heads),
            ("linear_num_value_heads", delta.n_value_heads),
            ("linear_key_head_dim", delta.head_dim.keys),
            ("linear_value_head_dim", delta.head_dim.values),
            ("linear_conv_kernel_dim", delta.conv_tokens),
        ];
        sizes(path, &fields)?;
        if !delta.n_value_heads.is_multiple_of(delta.n_key_heads) {
            let rule = format!("must be a multiple of linear_num_key_heads {}", delta.n_key_heads);
            return Err(Error::config(path, "linear_num_value_heads", delta.n_value_heads, rule));
        }
        if delta.conv_tokens < 2 {
            let (field, n) = ("linear_conv_kernel_dim", delta.conv_tokens);
            return Err(Error::config(path, field, n, "must be at least 2"));
        }
        if self.base.qkv_bias || self.base.output_bias {
            let why = format!("{} has attention_bias true", path.display());
            return Err(Error::unsupported("gated attention with biases", why));
        }
        Ok(())
    }

    fn spec(&self) -> ModelSpec {
        let mut spec = self.base.spec();
        for (i, layer) in spec.layers.iter_mut().enumerate() {
            if !self.attends(i) {
                *layer = LayerSpec::recurrent(self.delta);
            }
        }
        spec
    }

    fn tied_head(&self) -> bool {
        self.base.tied_head
    }

    fn norm_epsilon(&self) -> f64 {
        self.base.norm_epsilon
    }

    /// Returns the fields that [`read`](Self::read) reads.
    fn to_json(&self, path: &Path) -> Result<Map<String, Value>> {
        let Self { base, delta, .. } = self;
        if delta.order == HeadOrder::Tiled {
            let why = format!(
                "{}: GGUF files have them in another order; save a model of a Hugging Face folder",
                path.display()
            );
            return Err(Error::unsupported("value heads of a GGUF file in a saved model", why));
        }
        // All channels of a head have rope in Qwen3, whose other fields are the same.
        let whole = llama::Config { rotary_dim: base.attention.head_dim.keys, ..base.clone() };
        let mut fields = whole.to_json(path)?;
        let kind = |i| if self.attends(i) { FULL } else { LINEAR };
        let rope = match fields.remove("rope_scaling") {
            Some(Value::Object(scaling)) => scaling,
            _ => Map::from_iter([("rope_type".to_string(), json!("default"))]),
        };
        let own = json!({
            "rope_theta": base.rope_theta,
            "partial_rotary_factor": base.rotary_factor(),
            "mrope_interleaved": true,
        });
        let mut rope = extended(rope, own);
        if fill(&self.rope_sections, base.rotary_dim) {
            rope.insert("mrope_section".into(), json!(self.rope_sections));
        }
        fields.remove("rope_theta");
        let own = json!({
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "layer_types": (0..base.n_layers).map(kind).collect::<Vec<_>>(),
            "linear_num_key_heads": delta.n_key_heads,
            "linear_num_value_heads": delta.n_value_heads,
            "linear_key_head_dim": delta.head_dim.keys,
            "linear_value_head_dim": delta.head_dim.values,
            "linear_conv_kernel_dim": delta.conv_tokens,
            "rope_parameters": rope,
        });
        Ok(extended(fields, own))
    }
}

impl Config {
    /// Returns whether a layer has attention, not linear attention.
    pub fn attends(&self, layer: usize) -> bool {
        self.attention_layers.contains(&layer)
    }
}

/// Returns whether sections of time, height and width are all channel pairs with rope.
fn fill(sections: &[usize], rotary_dim: usize) -> bool {
    let sum = sections.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
    sections.len() == 3 && sum == Some(rotary_dim / 2)
}

fn attention_layers(path: &Path, types: &[String], n_layers: usize) -> Result<BTreeSet<usize>> {
    if let Some(kind) = types.iter().find(|kind| !matches!(kind.as_str(), FULL | LINEAR)) {
        let why =
            format!("{} has it in layer_types; {FULL} and {LINEAR} are supported", path.display());
        return Err(Error::unsupported(format!("attention {kind}"), why));
    }
    if types.len() != n_layers {
        let rule = format!("must be num_hidden_layers {n_layers}");
        return Err(Error::config(path, "length of layer_types", types.len(), rule));
    }
    Ok((0..n_layers).filter(|&i| types[i] == FULL).collect())
}

/// Returns the last of every `interval` layers.
fn every(path: &Path, interval: usize, n_layers: usize) -> Result<BTreeSet<usize>> {
    if interval == 0 {
        return Err(Error::config(path, "full_attention_interval", 0, "must be at least 1"));
    }
    Ok((interval - 1..n_layers).step_by(interval).collect())
}
