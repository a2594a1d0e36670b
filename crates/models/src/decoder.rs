//! What a model family implements: [`Decoder`].

use std::{any::Any, collections::HashMap, fmt::Debug, path::Path};

use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    tensor::{Int, Tensor},
};
use serde_json::{Map, Value};

use crate::{
    ModelSpec, Pass, Result,
    checkpoint::Exports,
    nn::{Linear, Matrix, PACKED},
};

/// A decoder-only language model that takes its KV cache as a parameter.
///
/// A type that implements it and Burn's [`Module`] becomes a
/// [`LanguageModel`](crate::LanguageModel) by [`new`](crate::LanguageModel::new).
pub trait Decoder: Any + Debug + Send + Sync {
    /// The first part of the paths of its parameters, as `Llama` in `Llama.layers.0.qkv.weight`.
    /// Checkpoints of training runs name parameters by their paths, so it must not change.
    fn name(&self) -> &'static str;

    /// What the model is, layer by layer.
    fn spec(&self) -> &ModelSpec;

    /// Final-normed hidden states of the tokens of `pass`, which gives every layer the memory of its
    /// attention.
    ///
    /// # Shapes
    ///
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    ///
    /// Those of [`Memory::attend`](crate::nn::Memory::attend).
    fn hidden(&self, ids: Tensor<2, Int>, pass: Pass<'_>) -> Result<Tensor<3>>;

    /// What [`logits`](Self::logits) takes, `[batch, seq, hidden]`: [`hidden`](Self::hidden) states, unless a family
    /// applies its final norm with the head.
    ///
    /// # Errors
    ///
    /// Those of [`hidden`](Self::hidden).
    fn states(&self, ids: Tensor<2, Int>, pass: Pass<'_>) -> Result<Tensor<3>> {
        self.hidden(ids, pass)
    }

    /// The logits of [`states`](Self::states), `[batch, seq, vocab]` in the type of [`head_weight`](Self::head_weight),
    /// whose rows they are the products with. A family whose final norm is a root mean square gives states before it and
    /// [`Matrix::project_normed`] of them, so that norm and products are one launch where they can be.
    fn logits(&self, states: Tensor<3>) -> Tensor<3> {
        self.head_weight().project(states)
    }

    /// The rows whose products with a final hidden state are the logits, `[vocab, hidden]`: the
    /// token embedding where the head is tied to it. Training computes its loss from them a block of
    /// rows at a time.
    fn head_weight(&self) -> &Matrix;

    /// Says of every parameter what it is for, by which training chooses what it trains.
    fn roles(&self, roles: &mut Roles);

    /// The projections of the layers, which training can put adapters on where their weights are packed. None, unless
    /// a family lists them.
    fn projections(&mut self) -> Vec<&mut Linear> {
        vec![]
    }

    /// Whether a recorded step computes no more than a launched one, so that it is recorded where nobody says. Not so
    /// where the host chooses what is computed.
    fn captures(&self) -> bool {
        true
    }

    /// The fields of `config.json` that say what the model is; `path` is for messages.
    ///
    /// # Errors
    ///
    /// A configuration that `config.json` cannot express.
    fn config_json(&self, path: &Path) -> Result<Map<String, Value>>;

    /// The tensors of a checkpoint, under their Hugging Face names.
    fn export(&self) -> Exports;
}

/// What a parameter is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Role {
    /// Rows that are looked up, by token or by position.
    Embedding,
    /// The output projection to the vocabulary, where it is not the token embedding.
    Head,
    /// The norm after the last layer.
    FinalNorm,
    /// A layer's norm before attention.
    AttentionNorm,
    /// A layer's query, key and value projections.
    Qkv,
    /// A layer's output projection of attention.
    AttentionOutput,
    /// A layer's norm before its MLP.
    MlpNorm,
    /// A layer's MLP.
    Mlp,
}

impl Role {
    /// Whether the parameter belongs to a layer's attention: its norm, projections and output.
    pub fn is_attention(self) -> bool {
        matches!(self, Self::AttentionNorm | Self::Qkv | Self::AttentionOutput)
    }

    /// Whether the parameter belongs to a layer.
    pub fn is_layer(self) -> bool {
        self.is_attention() || matches!(self, Self::MlpNorm | Self::Mlp)
    }
}

/// The [`Role`] of every parameter of a model.
#[derive(Clone, Debug, Default)]
pub struct Roles(HashMap<ParamId, Role>);

impl Roles {
    /// Says that all parameters and packed weights of `module` have this role; adapters on them have it too.
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

    /// The role of a parameter, or of packed weights by their [`Matrix::id`]; `None` for one that the model has not
    /// named.
    pub fn get(&self, id: ParamId) -> Option<Role> {
        self.0.get(&id).copied()
    }
}
