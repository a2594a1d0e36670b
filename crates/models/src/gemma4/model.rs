//! The transformer of Gemma 4: norms before and after attention and MLP as in Gemma 3, then the
//! layer's own input of each token, and a scale of the whole layer.

use burn::{
    module::{Module, Param},
    tensor::Tensor,
};

use super::{attention::Attention, config::Config, names::NAMES};
use crate::{
    checkpoint::Names,
    decoder::Role,
    error::Result,
    nn::{GatedMlp, Gating, Linear, RmsNorm, by_rows, gated},
    stack::{DecoderLayer, DecoderStack, LayerContext, LayerSource, LayerVisitor, MLP},
};

/// Gemma 4.
pub type Gemma4 = DecoderStack<Layer>;

/// One layer of [`Gemma4`].
#[derive(Module, Debug)]
pub struct Layer {
    /// Norm of the input of attention.
    pub attention_norm: RmsNorm,
    /// Attention.
    pub attention: Attention,
    /// Norm of the output of attention.
    pub post_attention_norm: RmsNorm,
    /// Norm of the input of the MLP.
    pub mlp_norm: RmsNorm,
    /// The MLP.
    pub mlp: GatedMlp,
    /// Norm of the output of the MLP.
    pub post_mlp_norm: RmsNorm,
    /// The use of the layer's own input of each token, if the model has such inputs.
    pub per_layer: Option<PerLayer>,
    /// The factor of the layer's output, `[1]`.
    pub scalar: Param<Tensor<1>>,
}

/// A gated projection of a layer's own input of each token.
#[derive(Module, Debug)]
pub struct PerLayer {
    /// The gate of the input, `[width, hidden]`.
    pub gate: Linear,
    /// The projection of the input, `[hidden, width]`.
    pub projection: Linear,
    /// Norm of the projection.
    pub norm: RmsNorm,
}

const POST_ATTENTION: &str = "post_attention_layernorm";
const MLP_NORM: &str = "pre_feedforward_layernorm";
const POST_MLP: &str = "post_feedforward_layernorm";
const GATE: &str = "per_layer_input_gate";
const PROJECTION: &str = "per_layer_projection";
const POST_INPUT: &str = "post_per_layer_input_norm";
const SCALAR: &str = "layer_scalar";

impl PerLayer {
    fn build(hidden: usize, width: usize, source: &mut LayerSource<'_>) -> Result<Self> {
        Ok(Self {
            gate: source.linear(GATE, [width, hidden], false)?,
            projection: source.residual(PROJECTION, [hidden, width], false)?,
            norm: source.norm(POST_INPUT, hidden)?,
        })
    }

    fn visit(&self, visitor: &mut LayerVisitor<'_>) {
        visitor.linear(Role::Mlp, GATE, &self.gate);
        visitor.linear(Role::Mlp, PROJECTION, &self.projection);
        visitor.norm(Role::MlpNorm, POST_INPUT, &self.norm);
    }

    /// Adds to `x` the projection of `input`, `[batch, seq, width]`, which `x` gates.
    fn forward_added(&self, x: Tensor<3>, input: Tensor<3>) -> Tensor<3> {
        let gate = self.gate.forward(x.clone());
        let gated = gated(Tensor::cat(vec![gate, input], 2), Gating::GeluTanh);
        x + self.norm.forward(self.projection.forward(gated))
    }
}

impl DecoderLayer for Layer {
    type Config = Config;
    type Norm = RmsNorm;

    const NAME: &'static str = "Gemma4";
    const NAMES: &'static Names = &NAMES;

    fn build(config: &Config, source: &mut LayerSource<'_>) -> Result<Self> {
        let (hidden, wide) = (config.shared.hidden_size, config.mlp_width(source.index()));
        let width = config.per_layer_inputs;
        let per_layer = (width > 0).then(|| PerLayer::build(hidden, width, source));
        Ok(Self {
            per_layer: per_layer.transpose()?,
            attention_norm: source.norm("input_layernorm", hidden)?,
            attention: Attention::build(config, source)?,
            post_attention_norm: source.norm(POST_ATTENTION, hidden)?,
            mlp_norm: source.norm(MLP_NORM, hidden)?,
            mlp: source.mlp(&MLP, [hidden, wide], Gating::GeluTanh)?,
            post_mlp_norm: source.norm(POST_MLP, hidden)?,
            scalar: source.vector(SCALAR, 1, 1.0)?,
        })
    }

    fn visit_parts(&self, config: &Config, visitor: &mut LayerVisitor<'_>) {
        self.attention.visit(config, visitor.index(), visitor);
        visitor.mlp(&MLP, &self.mlp);
        if let Some(per_layer) = &self.per_layer {
            per_layer.visit(visitor);
        }
        visitor.norm(Role::AttentionNorm, "input_layernorm", &self.attention_norm);
        visitor.norm(Role::AttentionNorm, POST_ATTENTION, &self.post_attention_norm);
        visitor.norm(Role::MlpNorm, MLP_NORM, &self.mlp_norm);
        visitor.norm(Role::MlpNorm, POST_MLP, &self.post_mlp_norm);
        visitor.vector(Role::MlpNorm, SCALAR, &self.scalar);
    }

    fn forward(&self, x: Tensor<3>, mut context: LayerContext<'_>) -> Result<Tensor<3>> {
        let input = context.per_layer.take();
        let heads = self.attention.attend(x.clone(), &self.attention_norm, context)?;
        let attended = |x| self.post_attention_norm.forward(self.attention.output.forward(x));
        let x = x + by_rows(heads, attended);
        let x = by_rows(x, |x| {
            let added = self.mlp.forward_normed(x.clone(), &self.mlp_norm);
            x + self.post_mlp_norm.forward(added)
        });
        let x = match (&self.per_layer, input) {
            (Some(per_layer), Some(input)) => per_layer.forward_added(x, input),
            _ => x,
        };
        Ok(x * self.scalar.val().unsqueeze())
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        let Self { attention, mlp, per_layer, .. } = self;
        let own = [&mut attention.qkv, &mut attention.output, &mut mlp.gate_up, &mut mlp.down];
        let input = per_layer.iter_mut().flat_map(|it| [&mut it.gate, &mut it.projection]);
        own.into_iter().chain(input).collect()
    }

    fn final_norm(_: &Config, width: usize, source: &mut LayerSource<'_>) -> Result<RmsNorm> {
        source.norm(Self::NORM, width)
    }
}
