//! Imports and exports the tensors of gpt-oss.
//!
//! Hugging Face files store all experts of a layer in one tensor, with gate and up rows
//! alternating: floats as `[expert, columns, rows]`, or blocks of MXFP4. GGUF files store gate and
//! up rows in two tensors, `[expert, rows, columns]`.

use super::{Config, Expert, Experts, Layer, Stacks};
use crate::{
    Result,
    checkpoint::{ExpertRows, Exports, Names, RowOrder, Weights},
    gguf::GgufNames,
    stack::{LLAMA_GGUF, LLAMA_NAMES, attention_parts},
};

pub(super) const NAMES: Names = Names {
    family: "gpt-oss",
    harmless: |name| name.ends_with("rotary_emb.inv_freq"),
    ..LLAMA_NAMES
};

pub(super) const GGUF: GgufNames = GgufNames {
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
    ..LLAMA_GGUF
};

fn attention(config: &Config, i: usize) -> [Vec<(String, usize)>; 2] {
    let Config { n_heads, n_kv_heads, head_dim, hidden_size, .. } = *config;
    attention_parts(i, hidden_size, [n_heads, n_kv_heads, head_dim])
}

impl Layer {
    /// Adds the tensors of layer `i`.
    pub(super) fn give(&self, config: &Config, i: usize, exports: &mut Exports) {
        let name = |part: &str| format!("layers.{i}.{part}");
        let [qkv, output] = attention(config, i);
        exports.linear(&qkv, &self.qkv);
        exports.linear(&output, &self.output);
        exports.parameter(&name("self_attn.sinks"), &self.sink_logits);
        exports.rms_norm(&name("input_layernorm"), &self.attention_norm);
        exports.rms_norm(&name("post_attention_layernorm"), &self.mlp_norm);
        let Experts { router, experts, .. } = &self.experts;
        exports.floats(&name("mlp.router"), &router.weight, router.bias.as_ref());
        // Gate and up rows alternate in files.
        let gate_up = experts.iter().map(|expert| &expert.gate_up);
        exports.experts(&name("mlp.experts.gate_up_proj"), gate_up, RowOrder::InTurn);
        let down = experts.iter().map(|expert| &expert.down);
        exports.experts(&name("mlp.experts.down_proj"), down, RowOrder::Same);
    }

    pub(super) fn take(config: &Config, i: usize, weights: &mut Weights) -> Result<Self> {
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
                let why = || "has another format than the rows of the gate".to_string();
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
