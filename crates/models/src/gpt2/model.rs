//! A pre-norm transformer with learned positions.

use burn::{
    module::Module,
    tensor::{Tensor, activation},
};

use super::{Activation, Config, names::NAMES};
use crate::{
    checkpoint::Names,
    decoder::Role,
    error::Result,
    nn::{LayerNorm, Linear, by_rows, in_f32},
    stack::{DecoderLayer, DecoderStack, LayerContext, LayerSource, LayerVisitor},
};

/// GPT-2, Radford et al. 2019.
pub type Gpt2 = DecoderStack<Layer>;

/// One layer of [`Gpt2`].
#[derive(Module, Debug)]
pub struct Layer {
    /// Norm before attention.
    pub attention_norm: LayerNorm,
    /// Query, key and value rows in one matrix.
    pub qkv: Linear,
    /// The output projection of attention.
    pub output: Linear,
    /// Norm before the MLP.
    pub mlp_norm: LayerNorm,
    /// The first projection of the MLP, `[intermediate, hidden]`.
    pub up: Linear,
    /// The second projection of the MLP, `[hidden, intermediate]`.
    pub down: Linear,
    /// The nonlinearity between them.
    #[module(skip)]
    pub activation: Activation,
}

impl DecoderLayer for Layer {
    type Config = Config;
    type Norm = LayerNorm;

    const NAME: &'static str = "Gpt2";
    const NAMES: &'static Names = &NAMES;
    const NORM: &'static str = "ln_f";
    const POSITIONS: Option<&'static str> = Some("wpe");

    fn build(config: &Config, source: &mut LayerSource<'_>) -> Result<Self> {
        let Config { hidden_size: width, intermediate_size: wide, activation, .. } = *config;
        let qkv = source.conv1d("attn.c_attn", width, 3 * width)?;
        let output = source.conv1d("attn.c_proj", width, width)?;
        let up = source.conv1d("mlp.c_fc", width, wide)?;
        let down = source.conv1d("mlp.c_proj", wide, width)?;
        let attention_norm = source.norm("ln_1", width)?;
        let mlp_norm = source.norm("ln_2", width)?;
        Ok(Self { attention_norm, qkv, output, mlp_norm, up, down, activation })
    }

    fn visit_parts(&self, _: &Config, visitor: &mut LayerVisitor<'_>) {
        visitor.norm(Role::AttentionNorm, "ln_1", &self.attention_norm);
        visitor.norm(Role::MlpNorm, "ln_2", &self.mlp_norm);
        visitor.conv1d(Role::Qkv, "attn.c_attn", &self.qkv);
        visitor.conv1d(Role::AttentionOutput, "attn.c_proj", &self.output);
        visitor.conv1d(Role::Mlp, "mlp.c_fc", &self.up);
        visitor.conv1d(Role::Mlp, "mlp.c_proj", &self.down);
    }

    fn forward(&self, x: Tensor<3>, context: LayerContext<'_>) -> Result<Tensor<3>> {
        let qkv = by_rows(x.clone(), |x| self.qkv.forward(self.attention_norm.forward(x)));
        let x = x + self.output.forward(context.attend(qkv, None)?);

        Ok(by_rows(x, |x| {
            let up = self.up.forward(self.mlp_norm.forward(x.clone()));
            let up = match self.activation {
                Activation::GeluTanh => in_f32(up, activation::gelu_approximate),
                Activation::Gelu => in_f32(up, activation::gelu),
                Activation::Relu => activation::relu(up),
            };
            x + self.down.forward(up)
        }))
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        vec![&mut self.qkv, &mut self.output, &mut self.up, &mut self.down]
    }

    fn final_norm(_: &Config, width: usize, source: &mut LayerSource<'_>) -> Result<LayerNorm> {
        source.norm(Self::NORM, width)
    }
}
