//! The transformer of DeepSeek-V4.

use burn::{
    module::Module,
    tensor::{DType, Tensor},
};

use super::{Attention, Config, Experts, HyperConnection, JoinedNorm, names::NAMES};
use crate::{
    checkpoint::Names,
    decoder::Role,
    error::Result,
    nn::{Linear, RmsNorm, by_rows},
    stack::{DecoderLayer, DecoderStack, LayerContext, LayerSource, LayerVisitor},
};

/// DeepSeek-V4, 2026.
pub type DeepseekV4 = DecoderStack<Layer>;

/// One layer of [`DeepseekV4`].
#[derive(Module, Debug)]
pub struct Layer {
    /// The residual streams around attention.
    pub attention_streams: HyperConnection,
    /// Norm of the input of attention.
    pub attention_norm: RmsNorm,
    /// Attention.
    pub attention: Attention,
    /// The residual streams around the experts.
    pub expert_streams: HyperConnection,
    /// Norm of the input of the experts.
    pub expert_norm: RmsNorm,
    /// The experts.
    pub experts: Experts,
}

const ATTENTION_STREAMS: &str = "hc_attn";
const ATTENTION_NORM: &str = "attn_norm";
const EXPERT_STREAMS: &str = "hc_ffn";
const EXPERT_NORM: &str = "ffn_norm";

impl DecoderLayer for Layer {
    type Config = Config;
    type Norm = JoinedNorm;

    const NAME: &'static str = "DeepseekV4";
    const NAMES: &'static Names = &NAMES;

    fn build(config: &Config, source: &mut LayerSource<'_>) -> Result<Self> {
        let width = config.hidden_size;
        Ok(Self {
            attention_streams: HyperConnection::build(config, ATTENTION_STREAMS, source)?,
            attention_norm: source.norm(ATTENTION_NORM, width)?,
            attention: Attention::build(config, source)?,
            expert_streams: HyperConnection::build(config, EXPERT_STREAMS, source)?,
            expert_norm: source.norm(EXPERT_NORM, width)?,
            experts: Experts::build(config, source)?,
        })
    }

    fn visit_parts(&self, config: &Config, visitor: &mut LayerVisitor<'_>) {
        self.attention_streams.visit(Role::AttentionNorm, ATTENTION_STREAMS, visitor);
        visitor.norm(Role::AttentionNorm, ATTENTION_NORM, &self.attention_norm);
        self.attention.visit(config, visitor);
        self.expert_streams.visit(Role::MlpNorm, EXPERT_STREAMS, visitor);
        visitor.norm(Role::MlpNorm, EXPERT_NORM, &self.expert_norm);
        self.experts.visit(visitor);
    }

    fn forward(&self, x: Tensor<3>, context: LayerContext<'_>) -> Result<Tensor<3>> {
        let (ids, captured) = (context.ids, context.memory.is_captured());
        let weights = self.attention_streams.weights(&x);
        let input = normed(&self.attention_norm, self.attention_streams.join(&x, &weights));
        let y = self.attention.forward(input, context)?;
        let x = self.attention_streams.update(x, y, weights);

        let weights = self.expert_streams.weights(&x);
        let input = normed(&self.expert_norm, self.expert_streams.join(&x, &weights));
        let y = self.experts.forward(input, ids, captured);
        Ok(self.expert_streams.update(x, y, weights))
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        self.attention.projections().chain(self.experts.projections()).collect()
    }

    /// Returns `false`, because the host reads which experts the router selected.
    fn captures(&self) -> bool {
        false
    }

    /// Repeats the embedding for every stream, in f32.
    fn widen(config: &Config, x: Tensor<3>) -> Tensor<3> {
        x.cast(DType::F32).repeat_dim(2, config.streams)
    }

    fn final_norm(config: &Config, _: usize, source: &mut LayerSource<'_>) -> Result<JoinedNorm> {
        JoinedNorm::build(config, Self::NORM, source)
    }
}

/// Applies a norm to states in f32, in the type of the model.
fn normed(norm: &RmsNorm, x: Tensor<3>) -> Tensor<3> {
    by_rows(x.cast(norm.gamma.dtype()), |x| norm.forward(x))
}
