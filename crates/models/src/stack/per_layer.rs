//! [`PerLayerInputs`]: inputs of each layer beside the residual stream.

use burn::{
    module::Module,
    tensor::{Int, Tensor},
};

use super::{LayerSource, LayerVisitor};
use crate::{
    checkpoint::Weights,
    decoder::Role,
    error::Result,
    nn::{Embedding, Linear, RmsNorm},
    spec::ModelSpec,
};

const EMBEDDING: &str = "embed_tokens_per_layer";
const PROJECTION: &str = "per_layer_model_projection";
const NORM: &str = "per_layer_projection_norm";

/// A small input of each layer for each token: rows of a second table of embeddings, and a
/// projection of the token's embedding (Gemma 3n and Gemma 4).
#[derive(Module, Debug)]
pub struct PerLayerInputs {
    /// The inputs of all layers for each token, `[vocab, n_layers * width]`.
    pub embedding: Embedding,
    /// The projection of embeddings, `[n_layers * width, hidden]`.
    pub projection: Linear,
    /// The norm of each layer's part of the projection, over `width` channels.
    pub norm: RmsNorm,
}

impl PerLayerInputs {
    /// Takes the inputs out of a checkpoint, if the model of `spec` has them.
    pub(super) fn import(
        spec: &ModelSpec,
        epsilon: f64,
        weights: &mut Weights,
    ) -> Result<Option<Self>> {
        let [rows, columns, width] = Self::sizes(spec);
        if width == 0 {
            return Ok(None);
        }
        Ok(Some(Self {
            embedding: weights.embedding(EMBEDDING, spec.vocab_size, columns)?,
            projection: weights.linear(&[(PROJECTION.into(), columns)], rows, false)?,
            norm: weights.rms_norm(NORM, width, epsilon)?,
        }))
    }

    /// Creates random inputs, if the model of `spec` has them.
    pub(super) fn random(spec: &ModelSpec, source: &mut LayerSource<'_>) -> Result<Option<Self>> {
        let [rows, columns, width] = Self::sizes(spec);
        if width == 0 {
            return Ok(None);
        }
        let table = source.table(EMBEDDING, [spec.vocab_size, columns], 1.0)?;
        Ok(Some(Self {
            embedding: Embedding { weight: table },
            projection: source.linear(PROJECTION, [columns, rows], false)?,
            norm: source.norm(NORM, width)?,
        }))
    }

    /// Returns the width of the residual stream, of the inputs of all layers, and of one layer.
    fn sizes(spec: &ModelSpec) -> [usize; 3] {
        let width = spec.per_layer_inputs;
        [spec.hidden_size, spec.layers.len() * width, width]
    }

    pub(super) fn visit(&self, visitor: &mut LayerVisitor<'_>) {
        visitor.part(Role::Embedding, &self.embedding, |exports, _| {
            exports.embedding(EMBEDDING, &self.embedding);
        });
        visitor.linear(Role::Mlp, PROJECTION, &self.projection);
        visitor.norm(Role::MlpNorm, NORM, &self.norm);
    }

    /// Returns the inputs of all layers.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - x: `[batch, seq, hidden]`, the embedded tokens
    /// - output: `[batch, seq, n_layers * width]`
    pub fn forward(&self, ids: Tensor<2, Int>, x: Tensor<3>) -> Tensor<3> {
        let [batch, seq, hidden] = x.dims();
        let width = self.norm.gamma.dims()[0];
        let rows = self.embedding.forward(ids) * (width as f64).sqrt();
        let all = rows.dims()[2];
        let projected = self.projection.forward(x) * (hidden as f64).powf(-0.5);
        let projected = self.norm.heads(projected.reshape([batch, seq, all / width, width]));
        (projected.reshape([batch, seq, all]) + rows) * 0.5f64.sqrt()
    }

    /// Returns the part of layer `index` in what [`forward`](Self::forward) returned, `[batch, seq,
    /// width]`.
    pub(super) fn of_layer(&self, inputs: &Tensor<3>, index: usize) -> Tensor<3> {
        let width = self.norm.gamma.dims()[0];
        inputs.clone().narrow(2, index * width, width)
    }
}
