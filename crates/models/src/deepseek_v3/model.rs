//! The transformer of DeepSeek-V3.

use burn::{module::Module, tensor::Tensor};

use super::{Config, LatentAttention, names::NAMES};
use crate::{
    checkpoint::Names,
    decoder::Role,
    error::Result,
    moe::{ExpertNames, Experts, FeedForward},
    nn::{GatedMlp, Linear, RmsNorm},
    stack::{DecoderLayer, DecoderStack, LayerContext, LayerSource, LayerVisitor},
};

/// DeepSeek-V3, <https://arxiv.org/abs/2412.19437>.
pub type DeepseekV3 = DecoderStack<Layer>;

/// One layer of [`DeepseekV3`]. It has either experts or an MLP.
#[derive(Module, Debug)]
pub struct Layer {
    /// Norm before attention.
    pub attention_norm: RmsNorm,
    /// Attention.
    pub attention: LatentAttention,
    /// Norm before the experts or the MLP.
    pub mlp_norm: RmsNorm,
    /// The MLP of a layer without experts.
    pub mlp: Option<GatedMlp>,
    /// The experts.
    pub experts: Option<Experts>,
}

impl Layer {
    fn feed_forward(&self) -> FeedForward<'_> {
        FeedForward { mlp: &self.mlp, experts: &self.experts }
    }
}

impl DecoderLayer for Layer {
    type Config = Config;
    type Norm = RmsNorm;

    const NAME: &'static str = "DeepseekV3";
    const NAMES: &'static Names = &NAMES;

    fn build(config: &Config, source: &mut LayerSource<'_>) -> Result<Self> {
        let (width, wide) = (config.hidden_size, config.intermediate_size);
        let (names, experts) = (&ExpertNames::QWEN, config.experts(source.index()));
        let attention_norm = source.norm("input_layernorm", width)?;
        let attention = LatentAttention::build(config, source)?;
        let (mlp, experts) = FeedForward::build(experts, [width, wide], names, source)?;
        let mlp_norm = source.norm("post_attention_layernorm", width)?;
        Ok(Self { attention_norm, attention, mlp_norm, mlp, experts })
    }

    fn visit_parts(&self, config: &Config, visitor: &mut LayerVisitor<'_>) {
        self.attention.visit(config, visitor);
        self.feed_forward().visit(&ExpertNames::QWEN, visitor);
        visitor.norm(Role::AttentionNorm, "input_layernorm", &self.attention_norm);
        visitor.norm(Role::MlpNorm, "post_attention_layernorm", &self.mlp_norm);
    }

    fn forward(&self, x: Tensor<3>, context: LayerContext<'_>) -> Result<Tensor<3>> {
        let captured = context.memory.is_captured();
        let x = self.attention.forward(x, &self.attention_norm, context)?;
        Ok(self.feed_forward().forward_added(x, &self.mlp_norm, captured))
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        let mlps = FeedForward::projections(&mut self.mlp, &mut self.experts);
        self.attention.projections().chain(mlps).collect()
    }

    fn captures(&self) -> bool {
        self.feed_forward().captures()
    }

    fn final_norm(_: &Config, width: usize, source: &mut LayerSource<'_>) -> Result<RmsNorm> {
        source.norm(Self::NORM, width)
    }
}
