//! A pre-norm transformer with learned positions.

use burn::{
    module::Module,
    tensor::{Tensor, activation},
};

use super::{Activation, Config, names::NAMES};
use crate::{
    DecoderLayer, DecoderStack, LayerSpec, Result, Role, Roles,
    checkpoint::{Exports, Names, Weights},
    nn::{LayerNorm, Linear, Memory, RopeRows, by_rows, in_f32},
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

    fn forward(
        &self,
        x: Tensor<3>,
        _: Option<&RopeRows>,
        spec: &LayerSpec,
        memory: Memory<'_>,
    ) -> Result<Tensor<3>> {
        let qkv = by_rows(x.clone(), |x| self.qkv.forward(self.attention_norm.forward(x)));
        let heads = spec.attend(qkv, None, memory)?;
        let x = x + self.output.forward(heads);

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

    fn roles(&self, roles: &mut Roles) {
        roles.add(Role::AttentionNorm, &self.attention_norm);
        roles.add(Role::Qkv, &self.qkv);
        roles.add(Role::AttentionOutput, &self.output);
        roles.add(Role::MlpNorm, &self.mlp_norm);
        roles.add(Role::Mlp, &self.up);
        roles.add(Role::Mlp, &self.down);
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        vec![&mut self.qkv, &mut self.output, &mut self.up, &mut self.down]
    }

    fn import(config: &Config, i: usize, weights: &mut Weights) -> Result<Self> {
        Self::take(config, i, weights)
    }

    fn export(&self, config: &Config, i: usize, exports: &mut Exports) {
        self.give(config, i, exports);
    }
}
