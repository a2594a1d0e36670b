//! A layer with attention, and experts or an MLP.

use std::marker::PhantomData;

use burn::{module::Module, tensor::Tensor};

use super::{config::MoeConfig, experts::Experts, feed_forward::FeedForward};
use crate::{
    checkpoint::Names,
    decoder::Role,
    error::Result,
    llama::{QK_NORMS, fused},
    nn::{GatedMlp, Linear, QkNorms, RmsNorm, by_rows},
    stack::{DecoderLayer, LayerContext, LayerSource, LayerVisitor},
};

/// One layer of a family with the configuration `C`. It has either experts or an MLP.
#[derive(Module, Debug)]
pub struct Layer<C: MoeConfig> {
    /// Norm before attention.
    pub attention_norm: RmsNorm,
    /// Query, key and value rows in one matrix.
    pub qkv: Linear,
    /// The output projection of attention.
    pub output: Linear,
    /// Norm before the experts or the MLP.
    pub mlp_norm: RmsNorm,
    /// Norms of the heads of queries and keys, if the family has them.
    pub qk_norms: Option<QkNorms>,
    /// The MLP of a layer without experts.
    pub mlp: Option<GatedMlp>,
    /// The experts.
    pub experts: Option<Experts>,
    /// The family.
    #[module(skip)]
    pub family: PhantomData<C>,
}

impl<C: MoeConfig> DecoderLayer for Layer<C> {
    type Config = C;
    type Norm = RmsNorm;

    const NAME: &'static str = C::NAME;
    const NAMES: &'static Names = C::NAMES;

    fn build(config: &C, source: &mut LayerSource<'_>) -> Result<Self> {
        let base = config.base();
        let (width, wide) = (base.hidden_size, base.intermediate_size);
        let heads = base.attention.n_heads * base.attention.head_dim.values;
        let [qkv, _] = fused(base, |_| false);
        let experts = config.experts(source.index());
        let (mlp, experts) = FeedForward::build(experts, [width, wide], &C::EXPERTS, source)?;
        Ok(Self {
            attention_norm: source.norm("input_layernorm", width)?,
            qkv: source.fused(&qkv, width, base.qkv_bias)?,
            output: source.residual("self_attn.o_proj", [width, heads], base.output_bias)?,
            mlp_norm: source.norm("post_attention_layernorm", width)?,
            qk_norms: match C::HAS_QK_NORMS {
                true => Some(source.qk_norms(QK_NORMS, base.attention.head_dim.keys)?),
                false => None,
            },
            mlp,
            experts,
            family: PhantomData,
        })
    }

    fn visit_parts(&self, config: &C, visitor: &mut LayerVisitor<'_>) {
        let [qkv, _] = fused(config.base(), |_| false);
        visitor.fused(Role::Qkv, &qkv, &self.qkv);
        visitor.linear(Role::AttentionOutput, "self_attn.o_proj", &self.output);
        self.feed_forward().visit(&C::EXPERTS, visitor);
        visitor.norm(Role::AttentionNorm, "input_layernorm", &self.attention_norm);
        visitor.norm(Role::MlpNorm, "post_attention_layernorm", &self.mlp_norm);
        if let Some(norms) = &self.qk_norms {
            visitor.qk_norms(Role::AttentionNorm, QK_NORMS, norms);
        }
    }

    fn forward(&self, x: Tensor<3>, context: LayerContext<'_>) -> Result<Tensor<3>> {
        let captured = context.memory.is_captured();
        let qkv = by_rows(x.clone(), |x| self.qkv.forward_normed(x, &self.attention_norm));
        let heads = context.attend(qkv, self.qk_norms.as_ref())?;
        let x = self.output.forward_added(heads, x);
        Ok(self.feed_forward().forward_added(x, &self.mlp_norm, captured))
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        let mlps = FeedForward::projections(&mut self.mlp, &mut self.experts);
        [&mut self.qkv, &mut self.output].into_iter().chain(mlps).collect()
    }

    fn captures(&self) -> bool {
        self.feed_forward().captures()
    }

    fn final_norm(_: &C, width: usize, source: &mut LayerSource<'_>) -> Result<RmsNorm> {
        source.norm(Self::NORM, width)
    }
}

impl<C: MoeConfig> Layer<C> {
    fn feed_forward(&self) -> FeedForward<'_> {
        FeedForward { mlp: &self.mlp, experts: &self.experts }
    }
}
