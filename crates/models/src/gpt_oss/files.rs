//! gpt-oss from tensors and to them.
//!
//! Hugging Face files have all experts of a layer in one tensor, gate and up rows alternating: floats as
//! `[expert, columns, rows]`, or blocks of MXFP4. GGUF files have a tensor of the experts' gates and one of their
//! up rows, `[expert, rows, columns]`.

use super::{Config, Expert, Experts, GptOss, Layer, Stacks};
use crate::{
    Result,
    checkpoint::{ExpertRows, Exports, Names, RowOrder, Weights},
    gguf::GgufNames,
};

const NAMES: Names = Names {
    family: "gpt-oss",
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
        ("attn_sinks", "self_attn.sinks"),
        ("attn_output", "self_attn.o_proj"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_gate_inp", "mlp.router"),
        ("ffn_gate_exps", "mlp.experts.gate_proj"),
        ("ffn_up_exps", "mlp.experts.up_proj"),
        ("ffn_down_exps", "mlp.experts.down_proj"),
    ],
};

/// The projections of attention, with their numbers of rows.
fn attention(config: &Config, i: usize) -> [Vec<(String, usize)>; 2] {
    let rows = |part: &str, rows| (format!("layers.{i}.self_attn.{part}"), rows);
    let Config { n_heads, n_kv_heads, head_dim, hidden_size, .. } = *config;
    let kv_rows = n_kv_heads * head_dim;
    let qkv = [("q_proj", n_heads * head_dim), ("k_proj", kv_rows), ("v_proj", kv_rows)];
    [qkv.map(|(part, n)| rows(part, n)).into(), vec![rows("o_proj", hidden_size)]]
}

impl GptOss {
    /// Builds the model, taking each tensor out of `weights` as it goes.
    pub(super) fn import(config: Config, weights: &mut Weights) -> Result<Self> {
        let Config { vocab_size, hidden_size, norm_epsilon, .. } = config;
        let spec = config.spec();
        weights.begin(&NAMES, &spec, config.tied_head)?;
        let embedding = weights.embedding("embed_tokens", vocab_size, hidden_size)?;
        let norm = weights.rms_norm("norm", hidden_size, norm_epsilon)?;
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

    /// The tensors of a checkpoint, the experts in floats.
    pub(super) fn exports(&self) -> Exports {
        let mut exports = Exports::new(&NAMES);
        exports.embedding("embed_tokens", &self.embedding);
        exports.rms_norm("norm", &self.norm);
        if let Some(head) = &self.head {
            exports.linear(&[("lm_head".into(), self.config.vocab_size)], head);
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let name = |part: &str| format!("layers.{i}.{part}");
            let [qkv, output] = attention(&self.config, i);
            exports.linear(&qkv, &layer.qkv);
            exports.linear(&output, &layer.output);
            exports.parameter(&name("self_attn.sinks"), &layer.sink_logits);
            exports.rms_norm(&name("input_layernorm"), &layer.attention_norm);
            exports.rms_norm(&name("post_attention_layernorm"), &layer.mlp_norm);
            let Experts { router, experts, .. } = &layer.experts;
            exports.floats(&name("mlp.router"), &router.weight, router.bias.as_ref());
            // Gate and up rows in turn, as they are in a file.
            let gate_up = experts.iter().map(|expert| &expert.gate_up);
            exports.experts(&name("mlp.experts.gate_up_proj"), gate_up, RowOrder::InTurn);
            let down = experts.iter().map(|expert| &expert.down);
            exports.experts(&name("mlp.experts.down_proj"), down, RowOrder::Same);
        }
        exports
    }
}

impl Layer {
    fn import(config: &Config, i: usize, weights: &mut Weights) -> Result<Self> {
        let Config { hidden_size, norm_epsilon, n_heads, head_dim, attention_bias, .. } = *config;
        let name = |part: &str| format!("layers.{i}.{part}");
        let [qkv, output] = attention(config, i);
        let attention_norm = name("input_layernorm");
        let mlp_norm = name("post_attention_layernorm");
        let sinks = match weights.is_gguf() {
            true => name("self_attn.sinks.weight"),
            false => name("self_attn.sinks"),
        };
        Ok(Self {
            attention_norm: weights.rms_norm(&attention_norm, hidden_size, norm_epsilon)?,
            qkv: weights.linear(&qkv, hidden_size, attention_bias)?,
            sink_logits: weights.parameter(&sinks, n_heads)?,
            output: weights.linear(&output, n_heads * head_dim, attention_bias)?,
            mlp_norm: weights.rms_norm(&mlp_norm, hidden_size, norm_epsilon)?,
            experts: Experts::import(config, &name("mlp"), weights)?,
        })
    }
}

impl Experts {
    fn import(config: &Config, layer: &str, weights: &mut Weights) -> Result<Self> {
        let Config { n_experts, hidden_size, intermediate_size: width, .. } = *config;
        let router = [(format!("{layer}.router"), n_experts)];
        let router = weights.linear(&router, hidden_size, true)?;
        let name = |part: &str| format!("{layer}.experts.{part}");
        let gate_up = if weights.is_gguf() {
            let [gate, up] = ["gate_proj", "up_proj"].map(name);
            let gate = weights.experts(&gate, [n_experts, width, hidden_size])?;
            let up = weights.experts(&up, [n_experts, width, hidden_size])?;
            let join = |(gate, up): (ExpertRows, ExpertRows)| {
                let why = || "is packed unlike the rows of the gate".to_string();
                gate.then(up).ok_or_else(|| weights.flawed(&name("up_proj"), why()))
            };
            gate.into_iter().zip(up).map(join).collect::<Result<Vec<_>>>()?
        } else {
            let all =
                weights.experts(&name("gate_up_proj"), [n_experts, 2 * width, hidden_size])?;
            all.into_iter().map(ExpertRows::split).collect()
        };
        let (gate_up, gate_up_stack) = weights.linears_of(gate_up)?;
        let down = weights.experts(&name("down_proj"), [n_experts, hidden_size, width])?;
        let (down, down_stack) = weights.linears_of(down)?;
        let expert = |(gate_up, down)| Expert { gate_up, down };
        Ok(Self {
            router,
            experts: gate_up.into_iter().zip(down).map(expert).collect(),
            per_token: config.experts_per_token,
            limit: config.swiglu_limit,
            stacks: gate_up_stack.zip(down_stack).map(|(gate_up, down)| Stacks { gate_up, down }),
        })
    }
}
