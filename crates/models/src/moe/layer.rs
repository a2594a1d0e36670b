//! A layer with attention, and experts or an MLP.

use std::marker::PhantomData;

use burn::{module::Module, tensor::Tensor};

use super::{config::MoeConfig, experts::Experts};
use crate::{
    checkpoint::Names,
    decoder::Role,
    error::Result,
    llama::{QK_NORMS, fused},
    nn::{GatedMlp, Gating, Linear, QkNorms, RmsNorm, by_rows},
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
        let [qkv, gate_up] = fused(base, |_| false);
        let (mlp, experts) = match config.experts(source.index()) {
            Some(experts) => (None, Some(Experts::build(experts, width, &C::EXPERTS, source)?)),
            None => {
                let gate_up = source.fused(&gate_up, width, false)?;
                let down = source.residual("mlp.down_proj", [width, wide], false)?;
                (Some(GatedMlp { gate_up, down, gating: Gating::Silu }), None)
            }
        };
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
        let [qkv, gate_up] = fused(config.base(), |_| false);
        visitor.fused(Role::Qkv, &qkv, &self.qkv);
        visitor.linear(Role::AttentionOutput, "self_attn.o_proj", &self.output);
        if let Some(mlp) = &self.mlp {
            visitor.fused(Role::Mlp, &gate_up, &mlp.gate_up);
            visitor.linear(Role::Mlp, "mlp.down_proj", &mlp.down);
        }
        if let Some(experts) = &self.experts {
            experts.visit(&C::EXPERTS, visitor);
        }
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
        if let Some(mlp) = &self.mlp {
            return Ok(by_rows(x, |x| mlp.forward_added(x, &self.mlp_norm)));
        }
        let normed = by_rows(x.clone(), |x| self.mlp_norm.forward(x));
        Ok(match &self.experts {
            Some(experts) => x + experts.forward(normed, captured),
            None => x,
        })
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        let experts = self.experts.iter_mut().flat_map(|experts| &mut experts.experts);
        let mlps = self.mlp.iter_mut().chain(experts);
        let mlps = mlps.flat_map(|mlp| [&mut mlp.gate_up, &mut mlp.down]);
        [&mut self.qkv, &mut self.output].into_iter().chain(mlps).collect()
    }

    /// Returns whether there are no experts, or they are packed on a GPU. Elsewhere a step for
    /// graph capture multiplies with all experts, because the host cannot read which ones the
    /// router selected.
    fn captures(&self) -> bool {
        self.experts.as_ref().is_none_or(|experts| experts.stacks.is_some())
    }

    fn final_norm(_: &C, width: usize, source: &mut LayerSource<'_>) -> Result<RmsNorm> {
        source.norm(Self::NORM, width)
    }
}
