//! The transformer of gpt-oss.

use burn::{
    module::{Module, Param},
    tensor::{DType, Tensor},
};

use super::{Config, Experts, files::NAMES};
use crate::{
    DecoderLayer, DecoderStack, LayerSpec, Result, Role, Roles,
    checkpoint::{Exports, Names, Weights},
    nn::{Linear, Memory, RmsNorm, RopeRows, by_rows},
};

/// gpt-oss, <https://arxiv.org/abs/2508.10925>.
pub type GptOss = DecoderStack<Layer>;

/// One layer of [`GptOss`].
#[derive(Module, Debug)]
pub struct Layer {
    /// Norm before attention.
    pub attention_norm: RmsNorm,
    /// Query, key and value rows in one matrix.
    pub qkv: Linear,
    /// The learned sink of every query head, `[n_heads]`.
    pub sink_logits: Param<Tensor<1>>,
    /// The output projection of attention.
    pub output: Linear,
    /// Norm before the MLP.
    pub mlp_norm: RmsNorm,
    /// The MLP.
    pub experts: Experts,
}

impl DecoderLayer for Layer {
    type Config = Config;
    type Norm = RmsNorm;

    const NAME: &'static str = "GptOss";
    const NAMES: &'static Names = &NAMES;

    fn forward(
        &self,
        x: Tensor<3>,
        rope: Option<&RopeRows>,
        spec: &LayerSpec,
        memory: Memory<'_>,
    ) -> Result<Tensor<3>> {
        let captured = memory.is_captured();
        let qkv = by_rows(x.clone(), |x| self.qkv.forward_normed(x, &self.attention_norm));
        let memory = memory.with_sinks(self.sink_logits.val().cast(DType::F32));
        let heads = spec.attend(qkv, rope, memory)?;
        let x = self.output.forward_added(heads, x);
        let normed = by_rows(x.clone(), |x| self.mlp_norm.forward(x));
        Ok(x + self.experts.forward(normed, captured))
    }

    fn roles(&self, roles: &mut Roles) {
        roles.add(Role::AttentionNorm, &self.attention_norm);
        roles.add(Role::AttentionNorm, &self.sink_logits);
        roles.add(Role::Qkv, &self.qkv);
        roles.add(Role::AttentionOutput, &self.output);
        roles.add(Role::MlpNorm, &self.mlp_norm);
        roles.add(Role::Mlp, &self.experts);
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        let experts = self.experts.experts.iter_mut();
        let experts = experts.flat_map(|expert| [&mut expert.gate_up, &mut expert.down]);
        [&mut self.qkv, &mut self.output].into_iter().chain(experts).collect()
    }

    /// Returns whether the experts are packed on a GPU. Elsewhere a step for graph capture
    /// multiplies with all experts, because the host cannot read which ones the router selected.
    fn captures(&self) -> bool {
        self.experts.picks_on_device()
    }

    fn import(config: &Config, i: usize, weights: &mut Weights) -> Result<Self> {
        Self::take(config, i, weights)
    }

    fn export(&self, config: &Config, i: usize, exports: &mut Exports) {
        self.give(config, i, exports);
    }
}
