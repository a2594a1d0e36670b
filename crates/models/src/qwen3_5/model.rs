//! The transformer of Qwen3.5.

use burn::{module::Module, tensor::Tensor};

use super::{Config, GatedAttention, LinearAttention, names};
use crate::{
    checkpoint::Names,
    decoder::Role,
    error::Result,
    nn::{GatedMlp, Gating, Linear, RmsNorm, by_rows},
    stack::{DecoderLayer, DecoderStack, LayerContext, LayerSource, LayerVisitor, MLP},
};

/// Qwen3.5.
pub type Qwen35 = DecoderStack<Layer>;

/// One layer of [`Qwen35`]. It has either linear attention or attention.
#[derive(Module, Debug)]
pub struct Layer {
    /// Norm before attention.
    pub attention_norm: RmsNorm,
    /// Linear attention.
    pub linear_attention: Option<LinearAttention>,
    /// Attention.
    pub attention: Option<GatedAttention>,
    /// Norm before the MLP.
    pub mlp_norm: RmsNorm,
    /// The MLP.
    pub mlp: GatedMlp,
}

impl DecoderLayer for Layer {
    type Config = Config;
    type Norm = RmsNorm;

    const NAME: &'static str = "Qwen35";
    const NAMES: &'static Names = &names::NAMES;

    fn build(config: &Config, source: &mut LayerSource<'_>) -> Result<Self> {
        let (width, wide) = (config.base.hidden_size, config.base.intermediate_size);
        let attends = config.attends(source.index());
        let attention =
            attends.then(|| GatedAttention::build(&config.base.attention, width, source));
        let attention = attention.transpose()?;
        let linear = (!attends).then(|| LinearAttention::build(&config.delta, width, source));
        Ok(Self {
            attention_norm: source.norm_plus_one("input_layernorm", width)?,
            linear_attention: linear.transpose()?,
            attention,
            mlp_norm: source.norm_plus_one("post_attention_layernorm", width)?,
            mlp: source.mlp(&MLP, [width, wide], Gating::Silu)?,
        })
    }

    fn visit_parts(&self, config: &Config, visitor: &mut LayerVisitor<'_>) {
        if let Some(linear) = &self.linear_attention {
            linear.visit(&config.delta, visitor);
        }
        if let Some(attention) = &self.attention {
            attention.visit(&config.base.attention, visitor);
        }
        visitor.mlp(&MLP, &self.mlp);
        visitor.norm(Role::AttentionNorm, "input_layernorm", &self.attention_norm);
        visitor.norm(Role::MlpNorm, "post_attention_layernorm", &self.mlp_norm);
    }

    fn forward(&self, x: Tensor<3>, context: LayerContext<'_>) -> Result<Tensor<3>> {
        let norm = &self.attention_norm;
        let x = match (&self.linear_attention, &self.attention) {
            (Some(linear), _) => linear.forward(x, norm, context.memory)?,
            (None, Some(attention)) => attention.forward(x, norm, context)?,
            (None, None) => x,
        };
        Ok(by_rows(x, |x| self.mlp.forward_added(x, &self.mlp_norm)))
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        let linear = self.linear_attention.iter_mut();
        let linear =
            linear.flat_map(|linear| [&mut linear.mixed, &mut linear.rates, &mut linear.output]);
        let attention = self.attention.iter_mut();
        let attention = attention.flat_map(|attention| [&mut attention.qkv, &mut attention.output]);
        linear.chain(attention).chain([&mut self.mlp.gate_up, &mut self.mlp.down]).collect()
    }

    fn final_norm(_: &Config, width: usize, source: &mut LayerSource<'_>) -> Result<RmsNorm> {
        source.norm_plus_one(Self::NORM, width)
    }
}
