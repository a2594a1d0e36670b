//! The transformer of gpt-oss.

use burn::{
    module::{Module, Param},
    tensor::{DType, Tensor},
};

use super::{Config, Experts, names::NAMES};
use crate::{
    checkpoint::{Exports, Names},
    decoder::Role,
    error::Result,
    nn::{Linear, RmsNorm, by_rows},
    stack::{DecoderLayer, DecoderStack, LayerContext, LayerSource, LayerVisitor},
};

/// gpt-oss, <https://arxiv.org/abs/2508.10925>.
pub type GptOss = DecoderStack<Layer>;

/// One layer of [`GptOss`].
#[derive(Module, Debug)]
pub struct Layer {
    /// Norm of the input of attention.
    pub attention_norm: RmsNorm,
    /// Query, key and value rows in one matrix, usually with a bias.
    pub qkv: Linear,
    /// The learned sink of every query head, `[n_heads]`.
    pub sink_logits: Param<Tensor<1>>,
    /// The output projection of attention.
    pub output: Linear,
    /// Norm of the input of the MLP.
    pub mlp_norm: RmsNorm,
    /// The MLP.
    pub experts: Experts,
}

impl DecoderLayer for Layer {
    type Config = Config;
    type Norm = RmsNorm;

    const NAME: &'static str = "GptOss";
    const NAMES: &'static Names = &NAMES;

    fn build(config: &Config, source: &mut LayerSource<'_>) -> Result<Self> {
        let shared = &config.shared;
        let (width, bias) = (shared.hidden_size, shared.attention_bias);
        let mlp = source.name("mlp");
        let sinks = match source.weights()?.is_gguf() {
            true => source.name("self_attn.sinks.weight"),
            false => source.name("self_attn.sinks"),
        };
        Ok(Self {
            attention_norm: source.norm("input_layernorm", width)?,
            qkv: source.fused(&shared.qkv(), width, bias)?,
            sink_logits: source.weights()?.parameter(&sinks, shared.n_heads)?,
            output: source.linear(
                "self_attn.o_proj",
                [width, shared.n_heads * shared.head_dim],
                bias,
            )?,
            mlp_norm: source.norm("post_attention_layernorm", width)?,
            experts: Experts::import(config, &mlp, source.weights()?)?,
        })
    }

    fn visit_parts(&self, config: &Config, visitor: &mut LayerVisitor<'_>) {
        visitor.fused(Role::Qkv, &config.shared.qkv(), &self.qkv);
        visitor.linear(Role::AttentionOutput, "self_attn.o_proj", &self.output);
        let sinks = &self.sink_logits;
        visitor.part(Role::AttentionNorm, sinks, |exports: &mut Exports, prefix| {
            exports.parameter(&format!("{prefix}self_attn.sinks"), sinks);
        });
        visitor.norm(Role::AttentionNorm, "input_layernorm", &self.attention_norm);
        visitor.norm(Role::MlpNorm, "post_attention_layernorm", &self.mlp_norm);
        visitor.part(Role::Mlp, &self.experts, |exports, prefix| {
            self.experts.export(&format!("{prefix}mlp"), exports);
        });
    }

    fn forward(&self, x: Tensor<3>, mut context: LayerContext<'_>) -> Result<Tensor<3>> {
        let captured = context.memory.is_captured();
        let qkv = by_rows(x.clone(), |x| self.qkv.forward_normed(x, &self.attention_norm));
        context.memory = context.memory.with_sinks(self.sink_logits.val().cast(DType::F32));
        let heads = context.attend(qkv, None)?;
        let x = self.output.forward_added(heads, x);
        let normed = by_rows(x.clone(), |x| self.mlp_norm.forward(x));
        Ok(x + self.experts.forward(normed, captured))
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        let experts = self.experts.experts.iter_mut();
        let experts = experts.flat_map(|expert| [&mut expert.gate_up, &mut expert.down]);
        [&mut self.qkv, &mut self.output].into_iter().chain(experts).collect()
    }

    /// Returns whether the experts are in one buffer. Otherwise a step for graph capture multiplies
    /// with all experts, because the host cannot read which ones the router selected.
    fn captures(&self) -> bool {
        self.experts.picks_on_device()
    }

    fn final_norm(_: &Config, width: usize, source: &mut LayerSource<'_>) -> Result<RmsNorm> {
        source.norm(Self::NORM, width)
    }
}
