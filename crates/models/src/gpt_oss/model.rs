//! The transformer of gpt-oss.

use std::path::Path;

use burn::{
    module::{Module, Param},
    tensor::{DType, Int, Tensor},
};
use serde_json::{Map, Value};

use super::{Config, Experts};
use crate::{
    Decoder, LayerSpec, ModelSpec, Pass, Result, Role, Roles,
    checkpoint::Exports,
    nn::{Embedding, Linear, Matrix, Memory, RmsNorm, RopeRows, by_rows},
};

/// gpt-oss, <https://arxiv.org/abs/2508.10925>.
#[derive(Module, Debug)]
pub struct GptOss {
    /// Token embeddings, `[vocab, hidden]`.
    pub embedding: Embedding,
    /// The layers, first to last.
    pub layers: Vec<Layer>,
    /// The final norm.
    pub norm: RmsNorm,
    /// The output projection; `None` when the token embedding is used for it.
    pub head: Option<Linear>,
    #[module(skip)]
    pub(super) spec: ModelSpec,
    #[module(skip)]
    pub(super) config: Config,
}

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

impl GptOss {
    /// The configuration the model was built from.
    pub fn config(&self) -> &Config {
        &self.config
    }
}

impl Decoder for GptOss {
    fn name(&self) -> &'static str {
        "GptOss"
    }

    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn hidden(&self, ids: Tensor<2, Int>, pass: Pass<'_>) -> Result<Tensor<3>> {
        Ok(self.norm.forward(self.states(ids, pass)?))
    }

    /// Those after the last layer, before the final norm.
    fn states(&self, ids: Tensor<2, Int>, mut pass: Pass<'_>) -> Result<Tensor<3>> {
        let on_device = matches!(pass, Pass::At { .. });
        let ropes = pass.ropes(&self.spec, ids.dims()[1], &ids.device());
        let mut x = self.embedding.forward(ids); // [batch, seq, hidden]
        let ropes = ropes.to_dtype(x.dtype()); // once for all layers
        for (i, (layer, spec)) in self.layers.iter().zip(&self.spec.layers).enumerate() {
            x = layer.attend(x, ropes.of(spec), spec, pass.layer(i))?;
            let normed = by_rows(x.clone(), |x| layer.mlp_norm.forward(x));
            x = x + layer.experts.forward(normed, on_device);
        }
        Ok(x)
    }

    fn logits(&self, states: Tensor<3>) -> Tensor<3> {
        self.head_weight().project_normed(states, &self.norm)
    }

    fn head_weight(&self) -> &Matrix {
        self.head.as_ref().map_or(&self.embedding.weight, |head| &head.weight)
    }

    fn roles(&self, roles: &mut Roles) {
        roles.add(Role::Embedding, &self.embedding);
        roles.add(Role::FinalNorm, &self.norm);
        roles.add(Role::Head, &self.head);
        for layer in &self.layers {
            roles.add(Role::AttentionNorm, &layer.attention_norm);
            roles.add(Role::AttentionNorm, &layer.sink_logits);
            roles.add(Role::Qkv, &layer.qkv);
            roles.add(Role::AttentionOutput, &layer.output);
            roles.add(Role::MlpNorm, &layer.mlp_norm);
            roles.add(Role::Mlp, &layer.experts);
        }
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        let layers = self.layers.iter_mut();
        let projections = layers.flat_map(|layer| {
            let experts = layer.experts.experts.iter_mut();
            let experts = experts.flat_map(|expert| [&mut expert.gate_up, &mut expert.down]);
            [&mut layer.qkv, &mut layer.output].into_iter().chain(experts)
        });
        projections.collect()
    }

    /// Where weights are packed on a GPU: elsewhere a recorded step multiplies with all experts, as the host cannot say
    /// with which.
    fn captures(&self) -> bool {
        self.layers.iter().all(|layer| layer.experts.picks_on_device())
    }

    fn config_json(&self, _: &Path) -> Result<Map<String, Value>> {
        Ok(self.config.to_json())
    }

    fn export(&self) -> Exports {
        self.exports()
    }
}

impl Layer {
    /// The layer's attention, and its input added.
    ///
    /// # Shapes
    ///
    /// - x: `[batch, seq, hidden]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    ///
    /// Those of [`Memory::attend`].
    pub fn attend(
        &self,
        x: Tensor<3>,
        rope: Option<&RopeRows>,
        spec: &LayerSpec,
        memory: Memory<'_>,
    ) -> Result<Tensor<3>> {
        let qkv = by_rows(x.clone(), |x| self.qkv.forward_normed(x, &self.attention_norm));
        let memory = memory.with_sinks(self.sink_logits.val().cast(DType::F32));
        let heads = spec.attend(qkv, rope, memory)?;
        Ok(self.output.forward_added(heads, x))
    }
}
