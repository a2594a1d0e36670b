//! A pre-norm transformer with learned positions.

use std::path::Path;

use burn::{
    module::Module,
    tensor::{Int, Tensor, activation},
};
use serde_json::{Map, Value};

use super::{Activation, Config};
use crate::{
    Decoder, LayerSpec, ModelSpec, Pass, Result, Role, Roles,
    checkpoint::Exports,
    nn::{Embedding, LayerNorm, Linear, Matrix, Memory, by_rows, in_f32},
};

/// GPT-2, Radford et al. 2019.
#[derive(Module, Debug)]
pub struct Gpt2 {
    /// Token embeddings, `[vocab, hidden]`.
    pub embedding: Embedding,
    /// Position embeddings, `[max_positions, hidden]`.
    pub positions: Embedding,
    /// The layers, first to last.
    pub layers: Vec<Layer>,
    /// The final norm.
    pub norm: LayerNorm,
    /// The output projection; `None` when the token embedding is used for it.
    pub head: Option<Linear>,
    #[module(skip)]
    pub(super) spec: ModelSpec,
    #[module(skip)]
    pub(super) config: Config,
}

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
}

impl Gpt2 {
    /// The configuration the model was built from.
    pub fn config(&self) -> &Config {
        &self.config
    }
}

impl Decoder for Gpt2 {
    fn name(&self) -> &'static str {
        "Gpt2"
    }

    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn hidden(&self, ids: Tensor<2, Int>, mut pass: Pass<'_>) -> Result<Tensor<3>> {
        let positions = pass.rows(&self.positions.weight, ids.dims()[1]); // [1 or batch, seq, hidden]
        let mut x = self.embedding.forward(ids) + positions;
        for (i, (layer, spec)) in self.layers.iter().zip(&self.spec.layers).enumerate() {
            x = layer.forward(x, spec, self.config.activation, pass.layer(i))?;
        }
        Ok(self.norm.forward(x))
    }

    fn head_weight(&self) -> &Matrix {
        self.head.as_ref().map_or(&self.embedding.weight, |head| &head.weight)
    }

    fn roles(&self, roles: &mut Roles) {
        roles.add(Role::Embedding, &self.embedding);
        roles.add(Role::Embedding, &self.positions);
        roles.add(Role::FinalNorm, &self.norm);
        roles.add(Role::Head, &self.head);
        for layer in &self.layers {
            roles.add(Role::AttentionNorm, &layer.attention_norm);
            roles.add(Role::Qkv, &layer.qkv);
            roles.add(Role::AttentionOutput, &layer.output);
            roles.add(Role::MlpNorm, &layer.mlp_norm);
            roles.add(Role::Mlp, &layer.up);
            roles.add(Role::Mlp, &layer.down);
        }
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        let layers = self.layers.iter_mut();
        let projections = layers
            .flat_map(|layer| [&mut layer.qkv, &mut layer.output, &mut layer.up, &mut layer.down]);
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
        spec: &LayerSpec,
        nonlinearity: Activation,
        memory: Memory<'_>,
    ) -> Result<Tensor<3>> {
        let qkv = by_rows(x.clone(), |x| self.qkv.forward(self.attention_norm.forward(x)));
        let heads = spec.attend(qkv, None, memory)?;
        let x = x + self.output.forward(heads);

        Ok(by_rows(x, |x| {
            let up = self.up.forward(self.mlp_norm.forward(x.clone()));
            let up = match nonlinearity {
                Activation::GeluTanh => in_f32(up, activation::gelu_approximate),
                Activation::Gelu => in_f32(up, activation::gelu),
                Activation::Relu => activation::relu(up),
            };
            x + self.down.forward(up)
        }))
    }
}
