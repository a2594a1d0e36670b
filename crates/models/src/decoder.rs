//! [`Decoder`], which model families implement, and the [`Role`] of every parameter.

use std::{any::Any, collections::HashMap, fmt::Debug, path::Path};

use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    tensor::{Int, Tensor},
};
use serde_json::{Map, Value};

use crate::{
    error::Result,
    exports::Exports,
    nn::{Linear, Matrix, PACKED},
    pass::Pass,
    spec::ModelSpec,
};

/// A decoder-only language model that takes its KV cache as a parameter.
///
/// A type that implements it and Burn's [`Module`] becomes a
/// [`LanguageModel`](crate::LanguageModel) by [`new`](crate::LanguageModel::new).
pub trait Decoder: Any + Debug + Send + Sync {
    /// Returns the first part of the parameter paths, such as `Llama` in
    /// `Llama.layers.0.qkv.weight`. Checkpoints of training runs name parameters by their paths, so
    /// it must not change.
    fn name(&self) -> &'static str;

    /// Returns the sizes of the model, layer by layer.
    fn spec(&self) -> &ModelSpec;

    /// Returns the hidden states of the tokens after the final norm. `pass` gives every layer the
    /// memory of its attention.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    /// Fails as [`Memory::attend`](crate::nn::Memory::attend) does.
    fn hidden(&self, ids: Tensor<2, Int>, pass: Pass<'_>) -> Result<Tensor<3>>;

    /// Returns the input of [`logits`](Self::logits), `[batch, seq, hidden]`. It is
    /// [`hidden`](Self::hidden), unless a family applies its final norm together with the head; the
    /// states of several residual streams are then wider.
    ///
    /// # Errors
    /// Fails as [`hidden`](Self::hidden) does.
    fn states(&self, ids: Tensor<2, Int>, pass: Pass<'_>) -> Result<Tensor<3>> {
        self.hidden(ids, pass)
    }

    /// Returns the logits of [`states`](Self::states), `[batch, seq, vocab]`, in the type of
    /// [`head_weight`](Self::head_weight). A family with an RMS norm can return states before the
    /// norm and use [`Matrix::project_normed`] here, which takes a single launch.
    fn logits(&self, states: Tensor<3>) -> Tensor<3> {
        self.head_weight().project(states)
    }

    /// Returns the bound of the logits, if the family has one: [`logits`](Self::logits) returns
    /// `cap * tanh(x / cap)` of the products `x` with the head.
    fn logit_softcap(&self) -> Option<f64> {
        None
    }

    /// Returns the weight of the head, `[vocab, hidden]`; the token embedding if the head is tied
    /// to it. Training computes its loss from a block of rows at a time.
    fn head_weight(&self) -> &Matrix;

    /// Adds the role of every parameter. Training selects parameters by role.
    fn roles(&self, roles: &mut Roles);

    /// Returns the projections of the layers. Training can put adapters on packed ones.
    fn projections(&mut self) -> Vec<&mut Linear> {
        vec![]
    }

    /// Returns whether a graph replay computes no more than a launched step. Graph capture is then
    /// the default.
    fn captures(&self) -> bool {
        true
    }

    /// Returns the fields of `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// Fails for a configuration that `config.json` cannot express.
    fn config_json(&self, path: &Path) -> Result<Map<String, Value>>;

    /// Returns the tensors of a checkpoint under their Hugging Face names.
    fn export(&self) -> Exports;
}

/// The purpose of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Role {
    /// Rows of a table, looked up by token or by position.
    Embedding,
    /// The output projection to the vocabulary, unless it is the token embedding.
    Head,
    /// The norm after the last layer.
    FinalNorm,
    /// A layer's norm before attention.
    AttentionNorm,
    /// A layer's query, key and value projections.
    Qkv,
    /// The indexer of a layer of sparse attention, which has a loss of its own.
    Indexer,
    /// A layer's output projection of attention.
    AttentionOutput,
    /// A layer's norm before its MLP.
    MlpNorm,
    /// A layer's MLP.
    Mlp,
}

impl Role {
    /// Returns whether the parameter belongs to a layer's attention: norm, projections or output.
    pub fn is_attention(self) -> bool {
        matches!(self, Self::AttentionNorm | Self::Qkv | Self::Indexer | Self::AttentionOutput)
    }

    /// Returns whether the parameter belongs to a layer.
    pub fn is_layer(self) -> bool {
        self.is_attention() || matches!(self, Self::MlpNorm | Self::Mlp)
    }
}

/// The [`Role`] of every parameter of a model.
#[derive(Clone, Debug, Default)]
pub struct Roles(HashMap<ParamId, Role>);

impl Roles {
    /// Gives this role to all parameters and packed weights of `module`, and to adapters on them.
    pub fn add<M: Module>(&mut self, role: Role, module: &M) {
        struct Add<'a>(&'a mut Roles, Role);
        impl ModuleVisitor for Add<'_> {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.0.0.insert(param.id, self.1);
            }

            fn enter_module(&mut self, name: &str, kind: &str) {
                if let Some(id) = (kind == PACKED).then(|| name.parse().ok()).flatten() {
                    self.0.0.insert(id, self.1);
                }
            }
        }
        module.visit(&mut Add(self, role));
    }

    /// Returns the role of a parameter, or of packed weights by their [`Matrix::id`]; `None`
    /// without a role.
    pub fn get(&self, id: ParamId) -> Option<Role> {
        self.0.get(&id).copied()
    }
}
