//! A pre-norm transformer with rotary positions, grouped-query attention and a gated MLP.

use std::path::Path;

use burn::{
    module::Module,
    tensor::{Int, Tensor},
};
use serde_json::{Map, Value};

use super::Config;
use crate::{
    Decoder, LayerSpec, ModelSpec, Pass, Result, Role, Roles,
    checkpoint::Exports,
    nn::{Embedding, GatedMlp, Linear, Matrix, Memory, QkNorms, RmsNorm, RopeRows, by_rows},
};

/// A model of the Llama family, <https://arxiv.org/abs/2302.13971>.
#[derive(Module, Debug)]
pub struct Llama {
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

impl Llama {
    /// The configuration the model was built from.
    pub fn config(&self) -> &Config {
        &self.config
    }
}

impl Decoder for Llama {
    fn name(&self) -> &'static str {
        "Llama"
    }

    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn hidden(&self, ids: Tensor<2, Int>, pass: Pass<'_>) -> Result<Tensor<3>> {
        Ok(self.norm.forward(self.states(ids, pass)?))
    }

    /// Those after the last layer, before the final norm.
    fn states(&self, ids: Tensor<2, Int>, mut pass: Pass<'_>) -> Result<Tensor<3>> {
        let seq = ids.dims()[1];
        let ropes = pass.ropes(&self.spec, seq, &ids.device());
        let mut x = self.embedding.forward(ids); // [batch, seq, hidden]
        let ropes = ropes.to_dtype(x.dtype()); // once for all layers
        for (i, (layer, spec)) in self.layers.iter().zip(&self.spec.layers).enumerate() {
            x = layer.forward(x, ropes.of(spec), spec, pass.layer(i))?;
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
            roles.add(Role::Qkv, &layer.qkv);
            roles.add(Role::AttentionNorm, &layer.qk_norms);
            roles.add(Role::AttentionOutput, &layer.output);
            roles.add(Role::MlpNorm, &layer.mlp_norm);
            roles.add(Role::Mlp, &layer.mlp);
        }
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        let layers = self.layers.iter_mut();
        let projections = layers.flat_map(|layer| {
            [&mut layer.qkv, &mut layer.output, &mut layer.mlp.gate_up, &mut layer.mlp.down]
        });
        projections.collect()
    }

    fn config_json(&self, path: &Path) -> Result<Map<String, Value>> {
        self.config.to_json(path)
    }

    fn export(&self) -> Exports {
        self.exports()
    }
}

impl Layer {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - x: `[batch, seq, hidden]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    ///
    /// Those of [`Memory::attend`].
    pub fn forward(
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
}
