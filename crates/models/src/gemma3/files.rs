//! Gemma 3 from tensors and to them.

use super::{Config, Gemma3, Layer};
use crate::{
    Result,
    checkpoint::{Exports, Names, Weights},
    gguf::GgufNames,
    nn::{GatedMlp, Gating, QkNorms},
};

const NAMES: Names = Names {
    family: "Gemma 3",
    prefix: "model.",
    layers: "layers.",
    embedding: "embed_tokens.weight",
    head: "lm_head.weight",
    harmless: |name| name.ends_with("rotary_emb.inv_freq"),
};

pub(super) const GGUF: GgufNames = GgufNames {
    layer: ("blk.", "layers."),
    outer: &[("token_embd", "embed_tokens"), ("output_norm", "norm"), ("output", "lm_head")],
    inner: &[
        ("attn_norm", "input_layernorm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
        ("attn_output", "self_attn.o_proj"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
    ],
};

/// The names of one layer's modules; projections with their numbers of rows.
struct LayerNames {
    norms: [String; 6],
    qkv: Vec<(String, usize)>,
    output: Vec<(String, usize)>,
    gate_up: Vec<(String, usize)>,
    down: Vec<(String, usize)>,
}

impl LayerNames {
    fn new(config: &Config, i: usize) -> Self {
        let name = |part: &str| format!("layers.{i}.{part}");
        let rows = |part: &str, rows| (name(part), rows);
        let Config { hidden_size, intermediate_size, head_dim, n_heads, n_kv_heads, .. } = *config;
        let kv_rows = n_kv_heads * head_dim;
        Self {
            norms: [
                "input_layernorm",
                "self_attn.q_norm",
                "self_attn.k_norm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ]
            .map(name),
            qkv: vec![
                rows("self_attn.q_proj", n_heads * head_dim),
                rows("self_attn.k_proj", kv_rows),
                rows("self_attn.v_proj", kv_rows),
            ],
            output: vec![rows("self_attn.o_proj", hidden_size)],
            gate_up: vec![
                rows("mlp.gate_proj", intermediate_size),
                rows("mlp.up_proj", intermediate_size),
            ],
            down: vec![rows("mlp.down_proj", hidden_size)],
        }
    }
}

impl Gemma3 {
    /// Builds the model, taking each tensor out of `weights` as it goes.
    pub(super) fn import(config: Config, weights: &mut Weights) -> Result<Self> {
        let Config { vocab_size, hidden_size, norm_epsilon, .. } = config;
        let spec = config.spec();
        weights.begin(&NAMES, &spec, config.tied_head)?;
        let embedding = weights.embedding("embed_tokens", vocab_size, hidden_size)?;
        let norm = weights.rms_norm_plus_one("norm", hidden_size, norm_epsilon)?;
        let head = weights.head(config.tied_head, vocab_size, hidden_size)?;
        let model = |spec, layers| Self {
            embedding: embedding.clone(),
            spec,
            layers,
            norm: norm.clone(),
            head: head.clone(),
            config: config.clone(),
        };
        let layer = |weights: &mut Weights, i| Layer::import(&config, i, weights);
        weights.layers(&spec, layer, model)
    }

    /// The tensors of a checkpoint.
    pub(super) fn exports(&self) -> Exports {
        let mut exports = Exports::new(&NAMES);
        exports.embedding("embed_tokens", &self.embedding);
        exports.rms_norm("norm", &self.norm);
        if let Some(head) = &self.head {
            exports.linear(&[("lm_head".into(), self.config.vocab_size)], head);
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let names = LayerNames::new(&self.config, i);
            exports.linear(&names.qkv, &layer.qkv);
            exports.linear(&names.output, &layer.output);
            exports.linear(&names.gate_up, &layer.mlp.gate_up);
            exports.linear(&names.down, &layer.mlp.down);
            let norms = [
                &layer.attention_norm,
                &layer.qk_norms.query,
                &layer.qk_norms.key,
                &layer.post_attention_norm,
                &layer.mlp_norm,
                &layer.post_mlp_norm,
            ];
            for (name, norm) in names.norms.iter().zip(norms) {
                exports.rms_norm(name, norm);
            }
        }
        exports
    }
}

impl Layer {
    fn import(config: &Config, i: usize, weights: &mut Weights) -> Result<Self> {
        let Config { hidden_size, intermediate_size, head_dim, attention_bias: bias, .. } = *config;
        let LayerNames { norms, qkv, output, gate_up, down } = LayerNames::new(config, i);
        let [attention, query, key, post_attention, mlp, post_mlp] = norms;
        let mut norm = |name, width| weights.rms_norm_plus_one(name, width, config.norm_epsilon);
        Ok(Self {
            attention_norm: norm(&attention, hidden_size)?,
            qk_norms: QkNorms { query: norm(&query, head_dim)?, key: norm(&key, head_dim)? },
            post_attention_norm: norm(&post_attention, hidden_size)?,
            mlp_norm: norm(&mlp, hidden_size)?,
            post_mlp_norm: norm(&post_mlp, hidden_size)?,
            qkv: weights.linear(&qkv, hidden_size, bias)?,
            output: weights.linear(&output, config.n_heads * head_dim, bias)?,
            mlp: GatedMlp {
                gate_up: weights.linear(&gate_up, hidden_size, false)?,
                down: weights.linear(&down, intermediate_size, false)?,
                gating: Gating::GeluTanh,
            },
        })
    }
}
