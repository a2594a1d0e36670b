//! The configuration in `config.json`: its fields, read, checked and written.

use std::{collections::BTreeSet, path::Path};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    Mode,
    config::{Config, HASHED, LayerKind, ROUTED},
};
use crate::{
    checkpoint::quantized::FP8,
    error::{Error, Result},
    family::ConfigJson,
    fields::{even, experts, extended, layers, positive, required, sizes},
    nn::{Rope, RopeScaling},
    rope_config::{self, RopeFields},
    spec::{LayerSpec, ModelSpec},
    stack::DecoderConfig,
};

/// Reads the fields of `config.json`.
fn read(json: &ConfigJson<'_>) -> Result<Config> {
    let (raw, path) = (json.parse::<Raw>()?, json.path);
    raw.check_features(path)?;
    let size = |field: &str, value| required(path, field, value);
    let n_layers = required(path, "num_hidden_layers", raw.num_hidden_layers)?;
    let n_layers = layers(path, "num_hidden_layers", n_layers)?;
    let head_dim = size("head_dim", raw.head_dim)?;
    let max_positions = size("max_position_embeddings", raw.max_position_embeddings)?;
    let rates = raw.compress_rates.as_ref();
    let ratios = [
        rates.and_then(|rates| rates.compressed_sparse_attention).unwrap_or(RATES[0]),
        rates.and_then(|rates| rates.heavily_compressed_attention).unwrap_or(RATES[1]),
    ];
    let [(rope_theta, rope_scaling), (compressed_rope_theta, compressed_rope_scaling)] =
        raw.ropes(path, max_positions)?;
    let scale = required(path, "routed_scaling_factor", raw.routed_scaling_factor)?;
    Ok(Config {
        vocab_size: size("vocab_size", raw.vocab_size)?,
        hidden_size: size("hidden_size", raw.hidden_size)?,
        intermediate_size: size("moe_intermediate_size", raw.moe_intermediate_size)?,
        layers: raw.layers(path, n_layers, ratios)?,
        hash_layers: raw.hash_layers(path, n_layers)?,
        n_heads: size("num_attention_heads", raw.num_attention_heads)?,
        head_dim,
        rotary_dim: raw.rotary_dim(path, head_dim)?,
        query_rank: size("q_lora_rank", raw.q_lora_rank)?,
        output_groups: size("o_groups", raw.o_groups)?,
        output_rank: size("o_lora_rank", raw.o_lora_rank)?,
        sliding_window: size("sliding_window", raw.sliding_window)?,
        selected_ratio: ratios[0],
        all_ratio: ratios[1],
        index_heads: size("index_n_heads", raw.index_n_heads)?,
        index_head_dim: size("index_head_dim", raw.index_head_dim)?,
        top_k: size("index_topk", raw.index_topk)?,
        n_experts: size("n_routed_experts", raw.n_routed_experts)?,
        experts_per_token: size("num_experts_per_tok", raw.num_experts_per_tok)?,
        routed_scale: scale,
        swiglu_limit: raw.swiglu_limit.unwrap_or(SWIGLU_LIMIT),
        streams: size("hc_mult", raw.hc_mult)?,
        sinkhorn_iterations: size("hc_sinkhorn_iters", raw.hc_sinkhorn_iters)?,
        stream_epsilon: raw.hc_eps.unwrap_or(EPSILON),
        max_positions,
        norm_epsilon: raw.rms_norm_eps.unwrap_or(EPSILON),
        rope_theta,
        rope_scaling,
        compressed_rope_theta,
        compressed_rope_scaling,
        mode: raw.mode(path)?,
    })
}

#[derive(Deserialize)]
struct Raw {
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    moe_intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    qk_rope_head_dim: Option<usize>,
    partial_rotary_factor: Option<f64>,
    q_lora_rank: Option<usize>,
    o_groups: Option<usize>,
    o_lora_rank: Option<usize>,
    sliding_window: Option<usize>,
    layer_types: Option<Vec<String>>,
    compress_ratios: Option<Vec<usize>>,
    compress_rates: Option<Rates>,
    mlp_layer_types: Option<Vec<String>>,
    num_hash_layers: Option<usize>,
    index_n_heads: Option<usize>,
    index_head_dim: Option<usize>,
    index_topk: Option<usize>,
    n_routed_experts: Option<usize>,
    n_shared_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    norm_topk_prob: Option<bool>,
    scoring_func: Option<String>,
    routed_scaling_factor: Option<f64>,
    hidden_act: Option<String>,
    swiglu_limit: Option<f64>,
    hc_mult: Option<usize>,
    hc_sinkhorn_iters: Option<usize>,
    hc_eps: Option<f64>,
    rms_norm_eps: Option<f64>,
    max_position_embeddings: Option<usize>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    tie_word_embeddings: Option<bool>,
    rope_theta: Option<f64>,
    compress_rope_theta: Option<f64>,
    rope_parameters: Option<Ropes>,
    rope_scaling: Option<Ropes>,
    inference_mode: Option<String>,
    quantization_config: Option<Quantization>,
}

#[derive(Deserialize)]
struct Quantization {
    quant_method: Option<String>,
}

#[derive(Deserialize)]
struct Rates {
    compressed_sparse_attention: Option<usize>,
    heavily_compressed_attention: Option<usize>,
}

/// Fields for layers without and with entries, or in older files for the latter only.
#[derive(Deserialize)]
struct Ropes {
    main: Option<RopeFields>,
    compress: Option<RopeFields>,
    #[serde(flatten)]
    flat: RopeFields,
}

/// The values of published models, whose files may lack the fields.
const RATES: [usize; 2] = [4, 128];
const EPSILON: f64 = 1e-6;
const SWIGLU_LIMIT: f64 = 10.0;

impl Raw {
    /// Refuses features that no published model has.
    fn check_features(&self, path: &Path) -> Result<()> {
        let texts = [
            ("hidden_act", &self.hidden_act, "silu"),
            ("scoring_func", &self.scoring_func, "sqrtsoftplus"),
        ];
        for (field, value, only) in texts {
            if let Some(value) = value.as_deref().filter(|value| *value != only) {
                return Err(Error::config(path, field, value, format!("must be {only}")));
            }
        }
        for (field, value) in [
            ("num_key_value_heads", self.num_key_value_heads),
            ("n_shared_experts", self.n_shared_experts),
        ] {
            if let Some(value) = value.filter(|value| *value != 1) {
                return Err(Error::config(path, field, value, "must be 1"));
            }
        }
        for (field, value, only) in [
            ("attention_bias", self.attention_bias, false),
            ("mlp_bias", self.mlp_bias, false),
            ("tie_word_embeddings", self.tie_word_embeddings, false),
            ("norm_topk_prob", self.norm_topk_prob, true),
        ] {
            if let Some(value) = value.filter(|value| *value != only) {
                return Err(Error::config(path, field, value, format!("must be {only}")));
            }
        }
        Ok(())
    }

    /// Returns the mode, which is a field of our own. Folders with weights in 8-bit floats are
    /// DeepSeek's, whose code rounds; transformers writes the others.
    fn mode(&self, path: &Path) -> Result<Mode> {
        let method = self.quantization_config.as_ref().and_then(|q| q.quant_method.as_deref());
        let Some(name) = &self.inference_mode else {
            return Ok(if method == Some(FP8) { Mode::Official } else { Mode::Transformers });
        };
        let found = Mode::ALL.into_iter().find(|mode| mode.name() == name);
        found.ok_or_else(|| {
            let names = Mode::ALL.map(Mode::name).join(" or ");
            Error::config(path, "inference_mode", name, format!("must be {names}"))
        })
    }

    /// Returns the attention of `n` layers. Older files have a ratio for each layer, and may have
    /// more for layers that predict later tokens.
    fn layers(&self, path: &Path, n: usize, [selected, all]: [usize; 2]) -> Result<Vec<LayerKind>> {
        if let Some(types) = &self.layer_types {
            check_length(path, "layer_types", types.len(), n)?;
            let kind = |name: &String| {
                let found = LayerKind::ALL.into_iter().find(|kind| kind.name() == name);
                found.ok_or_else(|| {
                    let names = LayerKind::ALL.map(LayerKind::name).join(", ");
                    Error::config(path, "layer_types", name, format!("must be one of {names}"))
                })
            };
            return types.iter().map(kind).collect();
        }
        let ratios = required(path, "layer_types", self.compress_ratios.as_ref())?;
        if ratios.len() < n {
            let rule = format!("must be at least num_hidden_layers {n}");
            return Err(Error::config(path, "length of compress_ratios", ratios.len(), rule));
        }
        let kind = |ratio: &usize| match *ratio {
            0 => Ok(LayerKind::Window),
            ratio if ratio == selected => Ok(LayerKind::Selected),
            ratio if ratio == all => Ok(LayerKind::All),
            other => {
                let rule = format!("must be 0, {selected} or {all}");
                Err(Error::config(path, "compress_ratios", other, rule))
            }
        };
        ratios.iter().take(n).map(kind).collect()
    }

    fn hash_layers(&self, path: &Path, n: usize) -> Result<BTreeSet<usize>> {
        let Some(types) = &self.mlp_layer_types else {
            let n_hash = required(path, "mlp_layer_types", self.num_hash_layers)?;
            return Ok((0..n.min(n_hash)).collect());
        };
        check_length(path, "mlp_layer_types", types.len(), n)?;
        if let Some(kind) = types.iter().find(|kind| !matches!(kind.as_str(), HASHED | ROUTED)) {
            let rule = format!("must be {HASHED} or {ROUTED}");
            return Err(Error::config(path, "mlp_layer_types", kind, rule));
        }
        Ok((0..n).filter(|&i| types[i] == HASHED).collect())
    }

    /// Returns base and scaling for layers without entries, and for layers with entries.
    fn ropes(&self, path: &Path, max_positions: usize) -> Result<[(f64, RopeScaling); 2]> {
        let ropes = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref());
        let ropes = required(path, "rope_parameters", ropes)?;
        let scaling = |fields: &RopeFields| {
            // The published models do not scale sines and cosines.
            let mut fields = fields.clone();
            if fields.kind().is_some() {
                fields.attention_factor.get_or_insert(1.0);
            }
            fields.scaling(path, max_positions, None)
        };
        if ropes.main.is_none() && ropes.compress.is_none() {
            let theta = required(path, "rope_theta", self.rope_theta)?;
            let compressed = required(path, "compress_rope_theta", self.compress_rope_theta)?;
            required(path, "rope_parameters.rope_type", ropes.flat.kind())?;
            return Ok([(theta, RopeScaling::Default), (compressed, scaling(&ropes.flat)?)]);
        }
        let rope = |name: &str, fields: &Option<RopeFields>| -> Result<_> {
            let fields = required(path, &format!("rope_parameters.{name}"), fields.as_ref())?;
            let theta = format!("rope_parameters.{name}.rope_theta");
            Ok((required(path, &theta, fields.rope_theta)?, scaling(fields)?))
        };
        Ok([rope("main", &ropes.main)?, rope("compress", &ropes.compress)?])
    }

    /// Returns the channels of a head with rope. Every field that gives them must agree.
    fn rotary_dim(&self, path: &Path, head_dim: usize) -> Result<usize> {
        let ropes = self.rope_parameters.iter();
        let ropes = ropes.flat_map(|ropes| [&ropes.main, &ropes.compress]).flatten();
        let factors = ropes.filter_map(|fields| fields.partial_rotary_factor);
        let factors = self.partial_rotary_factor.into_iter().chain(factors);
        let mut found = self.qk_rope_head_dim;
        for factor in factors {
            let channels = (head_dim as f64 * factor) as usize;
            if let Some(other) = found.filter(|found| *found != channels) {
                let rule = format!("gives {channels} of {head_dim} channels, not {other}");
                return Err(Error::config(path, "partial_rotary_factor", factor, rule));
            }
            found = Some(channels);
        }
        required(path, "qk_rope_head_dim", found)
    }
}

fn check_length(path: &Path, field: &str, length: usize, n_layers: usize) -> Result<()> {
    if length == n_layers {
        return Ok(());
    }
    let rule = format!("must be num_hidden_layers {n_layers}");
    Err(Error::config(path, format!("length of {field}"), length, rule))
}

impl Config {
    /// Checks that blocks fill the channels that a mode rounds.
    fn check_mode(&self, path: &Path) -> Result<()> {
        if self.mode == Mode::Transformers {
            return Ok(());
        }
        let (rounded, width) = (self.head_dim - self.rotary_dim, self.index_head_dim);
        if !rounded.is_multiple_of(64) {
            let rule = format!(
                "must exceed qk_rope_head_dim {} by a multiple of 64 for inference_mode official; \
                 set inference_mode to transformers",
                self.rotary_dim
            );
            return Err(Error::config(path, "head_dim", self.head_dim, rule));
        }
        if self.layers.contains(&LayerKind::Selected) && !matches!(width, 32 | 64 | 128 | 256) {
            let rule = "must be 32, 64, 128 or 256 for inference_mode official; set \
                        inference_mode to transformers";
            return Err(Error::config(path, "index_head_dim", width, rule));
        }
        Ok(())
    }
}

impl DecoderConfig for Config {
    const MODEL_TYPES: &'static [&'static str] = &["deepseek_v4"];
    const QUANTIZATIONS: &'static [&'static str] = &[FP8];

    fn read(json: &ConfigJson<'_>, notes: &mut Vec<String>) -> Result<Self> {
        let config = read(json)?;
        if config.mode == Mode::Official {
            notes.push(format!(
                "{}: inference_mode official: attention rounds rows to fp8 and indexers round \
                 queries and keys to fp4, as DeepSeek's code does; set inference_mode to \
                 transformers for neither",
                json.path.display()
            ));
        }
        Ok(config)
    }

    fn check(&self, path: &Path) -> Result<()> {
        layers(path, "num_hidden_layers", self.layers.len())?;
        sizes(path, &self.sizes())?;
        for (kind, ratio) in self.rates() {
            sizes(path, &[(&format!("compress_rates.{kind}"), ratio)])?;
        }
        if let Some(layer) = self.hash_layers.last().filter(|last| **last >= self.layers.len()) {
            let rule = format!("must be below num_hidden_layers {}", self.layers.len());
            return Err(Error::config(path, "hash layer", layer, rule));
        }
        if !self.n_heads.is_multiple_of(self.output_groups) {
            let rule = format!("must divide num_attention_heads {}", self.n_heads);
            return Err(Error::config(path, "o_groups", self.output_groups, rule));
        }
        even(path, "qk_rope_head_dim", self.rotary_dim)?;
        for (field, value) in [("head_dim", self.head_dim), ("index_head_dim", self.index_head_dim)]
        {
            if value < self.rotary_dim {
                let rule = format!("must be at least qk_rope_head_dim {}", self.rotary_dim);
                return Err(Error::config(path, field, value, rule));
            }
        }
        experts(path, ("n_routed_experts", self.n_experts), self.experts_per_token)?;
        for (field, value) in [
            ("routed_scaling_factor", self.routed_scale),
            ("swiglu_limit", self.swiglu_limit),
            ("hc_eps", self.stream_epsilon),
            ("rms_norm_eps", self.norm_epsilon),
            ("rope_parameters.main.rope_theta", self.rope_theta),
            ("rope_parameters.compress.rope_theta", self.compressed_rope_theta),
        ] {
            positive(path, field, value)?;
        }
        self.check_mode(path)?;
        rope_config::check(path, &self.rope_scaling, self.rotary_dim)?;
        rope_config::check(path, &self.compressed_rope_scaling, self.rotary_dim)
    }

    fn spec(&self) -> ModelSpec {
        let layer = LayerSpec::new(self.n_heads, 1, self.head_dim)
            .with_sliding_window(Some(self.sliding_window));
        let layers = (0..self.layers.len()).map(|i| {
            let rope = usize::from(self.layers[i] != LayerKind::Window);
            layer.with_rope(Some(rope)).with_sparse(self.sparse(i))
        });
        let ropes = [
            Rope::new(self.rotary_dim, self.rope_theta, &self.rope_scaling),
            Rope::new(self.rotary_dim, self.compressed_rope_theta, &self.compressed_rope_scaling),
        ];
        let Self { vocab_size, hidden_size, max_positions, .. } = *self;
        ModelSpec::new(vocab_size, hidden_size, max_positions, layers.collect())
            .with_ropes(ropes.into())
    }

    fn norm_epsilon(&self) -> f64 {
        self.norm_epsilon
    }

    /// Returns the fields that [`read`](Self::read) reads.
    fn to_json(&self, _: &Path) -> Result<Map<String, Value>> {
        let factor = self.rotary_dim as f64 / self.head_dim as f64;
        let rope = |theta: f64, scaling: &RopeScaling| {
            let mut fields = rope_config::to_json(scaling, self.max_positions);
            if fields.is_null() {
                fields = json!({"rope_type": "default"});
            }
            fields["rope_theta"] = json!(theta);
            fields["partial_rotary_factor"] = json!(factor);
            fields
        };
        let mlp = |i| if self.hash_layers.contains(&i) { HASHED } else { ROUTED };
        let layer_types: Vec<_> = self.layers.iter().map(|kind| kind.name()).collect();
        let mlp_layer_types: Vec<_> = (0..self.layers.len()).map(mlp).collect();
        let more = json!({
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "inference_mode": self.mode.name(),
            "layer_types": layer_types,
            "mlp_layer_types": mlp_layer_types,
            "compress_rates": Map::from_iter(self.rates().map(|(kind, n)| (kind.into(), json!(n)))),
            "partial_rotary_factor": factor,
            "n_shared_experts": 1,
            "norm_topk_prob": true,
            "scoring_func": "sqrtsoftplus",
            "routed_scaling_factor": self.routed_scale,
            "swiglu_limit": self.swiglu_limit,
            "hc_eps": self.stream_epsilon,
            "rms_norm_eps": self.norm_epsilon,
            "hidden_act": "silu",
            "attention_bias": false,
            "mlp_bias": false,
            "tie_word_embeddings": false,
            "num_nextn_predict_layers": 0,
            "rope_theta": self.rope_theta,
            "compress_rope_theta": self.compressed_rope_theta,
            "rope_parameters": {
                "main": rope(self.rope_theta, &self.rope_scaling),
                "compress": rope(self.compressed_rope_theta, &self.compressed_rope_scaling),
            },
        });
        let sizes = self.sizes().map(|(field, value)| (field.to_string(), json!(value)));
        Ok(extended(sizes.into_iter().collect(), more))
    }
}
