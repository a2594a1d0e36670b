//! A pre-norm transformer with rope, grouped-query attention and a gated MLP.

use burn::{module::Module, tensor::Tensor};

use super::Config;
use crate::{
    DecoderLayer, DecoderStack, LayerSpec, Result, Role, Roles,
    checkpoint::{Exports, Names, Weights},
    nn::{GatedMlp, Linear, Memory, QkNorms, RmsNorm, RopeRows, by_rows},
    stack::LLAMA_NAMES,
};

/// A model of the Llama family, <https://arxiv.org/abs/2302.13971>.
pub type Llama = DecoderStack<Layer>;

/// One layer of [`Llama`].
#[derive(Module, Debug)]
pub struct Layer {
    /// Norm before attention.
    pub attention_norm: RmsNorm,
    /// Query, key and value rows in one matrix.
    pub qkv: Linear,
    /// The output projection of attention.
    pub output: Linear,
    /// Norm before the MLP.
    pub mlp_norm: RmsNorm,
    /// The MLP.
    pub mlp: GatedMlp,
    /// Norms of the heads of queries and keys, if the model has them.
    pub qk_norms: Option<QkNorms>,
}

impl DecoderLayer for Layer {
    type Config = Config;
    type Norm = RmsNorm;

    const NAME: &'static str = "Llama";
    const NAMES: &'static Names = &LLAMA_NAMES;

    fn forward(
        &self,
        x: Tensor<3>,
        rope: Option<&RopeRows>,
        spec: &LayerSpec,
        memory: Memory<'_>,
    ) -> Result<Tensor<3>> {
        let qkv = by_rows(x.clone(), |x| self.qkv.forward_normed(x, &self.attention_norm));
        let heads = spec.attend_normed(qkv, self.qk_norms.as_ref(), rope, memory)?;
        let x = self.output.forward_added(heads, x);
        Ok(by_rows(x, |x| self.mlp.forward_added(x, &self.mlp_norm)))
    }

    fn roles(&self, roles: &mut Roles) {
        roles.add(Role::AttentionNorm, &self.attention_norm);
        roles.add(Role::Qkv, &self.qkv);
        roles.add(Role::AttentionNorm, &self.qk_norms);
        roles.add(Role::AttentionOutput, &self.output);
        roles.add(Role::MlpNorm, &self.mlp_norm);
        roles.add(Role::Mlp, &self.mlp);
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        vec![&mut self.qkv, &mut self.output, &mut self.mlp.gate_up, &mut self.mlp.down]
    }

    fn import(config: &Config, i: usize, weights: &mut Weights) -> Result<Self> {
        Self::take(config, i, weights)
    }

    fn export(&self, config: &Config, i: usize, exports: &mut Exports) {
        self.give(config, i, exports);
    }
}
