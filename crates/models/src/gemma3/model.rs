//! The transformer of Gemma 3: norms before and after attention and MLP, and of queries and keys.
//! Layers with a sliding window and their own rope base alternate with layers that see all tokens.

use burn::{module::Module, tensor::Tensor};

use super::{Config, files::NAMES};
use crate::{
    DecoderLayer, DecoderStack, LayerSpec, Result, Role, Roles,
    checkpoint::{Exports, Names, Weights},
    nn::{GatedMlp, Linear, Memory, QkNorms, RmsNorm, RopeRows, by_rows},
};

/// Gemma 3, <https://arxiv.org/abs/2503.19786>.
pub type Gemma3 = DecoderStack<Layer>;

/// One layer of [`Gemma3`].
#[derive(Module, Debug)]
pub struct Layer {
    /// Norm before attention.
    pub attention_norm: RmsNorm,
    /// Query, key and value rows in one matrix.
    pub qkv: Linear,
    /// Norms of the heads of queries and keys.
    pub qk_norms: QkNorms,
    /// The output projection of attention.
    pub output: Linear,
    /// Norm of the output of attention.
    pub post_attention_norm: RmsNorm,
    /// Norm before the MLP.
    pub mlp_norm: RmsNorm,
    /// The MLP.
    pub mlp: GatedMlp,
    /// Norm of the output of the MLP.
    pub post_mlp_norm: RmsNorm,
}

impl DecoderLayer for Layer {
    type Config = Config;
    type Norm = RmsNorm;

    const NAME: &'static str = "Gemma3";
    const NAMES: &'static Names = &NAMES;

    fn forward(
        &self,
        x: Tensor<3>,
        rope: Option<&RopeRows>,
        spec: &LayerSpec,
        memory: Memory<'_>,
    ) -> Result<Tensor<3>> {
        let qkv = by_rows(x.clone(), |x| self.qkv.forward_normed(x, &self.attention_norm));
        let heads = spec.attend_normed(qkv, Some(&self.qk_norms), rope, memory)?;
        let x = x + by_rows(heads, |x| self.post_attention_norm.forward(self.output.forward(x)));
        Ok(by_rows(x, |x| {
            let added = self.mlp.forward_normed(x.clone(), &self.mlp_norm);
            x + self.post_mlp_norm.forward(added)
        }))
    }

    fn roles(&self, roles: &mut Roles) {
        roles.add(Role::AttentionNorm, &self.attention_norm);
        roles.add(Role::AttentionNorm, &self.qk_norms);
        roles.add(Role::AttentionNorm, &self.post_attention_norm);
        roles.add(Role::Qkv, &self.qkv);
        roles.add(Role::AttentionOutput, &self.output);
        roles.add(Role::MlpNorm, &self.mlp_norm);
        roles.add(Role::MlpNorm, &self.post_mlp_norm);
        roles.add(Role::Mlp, &self.mlp);
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        vec![&mut self.qkv, &mut self.output, &mut self.mlp.gate_up, &mut self.mlp.down]
    }

    fn import_norm(config: &Config, width: usize, weights: &mut Weights) -> Result<RmsNorm> {
        weights.rms_norm_plus_one(Self::NORM, width, config.norm_epsilon)
    }

    fn import(config: &Config, i: usize, weights: &mut Weights) -> Result<Self> {
        Self::take(config, i, weights)
    }

    fn export(&self, config: &Config, i: usize, exports: &mut Exports) {
        self.give(config, i, exports);
    }
}
