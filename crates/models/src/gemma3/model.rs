//! The transformer of Gemma 3: norms before and after attention and MLP, and of queries and keys; layers
//! with a window and a rotary base of their own between layers that see all tokens.

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

/// Gemma 3, <https://arxiv.org/abs/2503.19786>.
#[derive(Module, Debug)]
pub struct Gemma3 {
    /// Token embeddings, `[vocab, hidden]`; what is looked up is multiplied by the root of `hidden`.
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
    /// Norm of what attention adds.
    pub post_attention_norm: RmsNorm,
    /// Norm before the MLP.
    pub mlp_norm: RmsNorm,
    /// The MLP.
    pub mlp: GatedMlp,
    /// Norm of what the MLP adds.
    pub post_mlp_norm: RmsNorm,
}

impl Gemma3 {
    /// The configuration the model was built from.
    pub fn config(&self) -> &Config {
        &self.config
    }
}

impl Decoder for Gemma3 {
    fn name(&self) -> &'static str {
        "Gemma3"
    }

    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn hidden(&self, ids: Tensor<2, Int>, pass: Pass<'_>) -> Result<Tensor<3>> {
        Ok(self.norm.forward(self.states(ids, pass)?))
    }

    /// Those after the last layer, before the final norm.
    fn states(&self, ids: Tensor<2, Int>, mut pass: Pass<'_>) -> Result<Tensor<3>> {
        let ropes = pass.ropes(&self.spec, ids.dims()[1], &ids.device());
        let scale = (self.spec.hidden_size as f64).sqrt();
        let mut x = self.embedding.forward(ids) * scale; // [batch, seq, hidden]
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
            roles.add(Role::AttentionNorm, &layer.qk_norms);
            roles.add(Role::AttentionNorm, &layer.post_attention_norm);
            roles.add(Role::Qkv, &layer.qkv);
            roles.add(Role::AttentionOutput, &layer.output);
            roles.add(Role::MlpNorm, &layer.mlp_norm);
            roles.add(Role::MlpNorm, &layer.post_mlp_norm);
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

    fn config_json(&self, _: &Path) -> Result<Map<String, Value>> {
        Ok(self.config.to_json())
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
        let heads = spec.attend_normed(qkv, Some(&self.qk_norms), rope, memory)?;
        let x = x + by_rows(heads, |x| self.post_attention_norm.forward(self.output.forward(x)));
        Ok(by_rows(x, |x| {
            let added = self.mlp.forward_normed(x.clone(), &self.mlp_norm);
            x + self.post_mlp_norm.forward(added)
        }))
    }
}
