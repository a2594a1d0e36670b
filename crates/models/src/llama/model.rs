//! A pre-norm transformer with rotary positions, grouped-query attention and a gated MLP.

use burn::{
    module::Module,
    nn::{Embedding, RmsNorm},
    tensor::{Int, Tensor},
};

use super::Config;
use crate::{
    Result,
    nn::{KvMemory, Linear, Pass, Rope, Rotation, SwiGlu, by_rows, project},
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
    pub(super) rope: Rope,
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
    pub mlp: SwiGlu,
}

impl Llama {
    /// The configuration the model was built from.
    pub fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn rope(&self) -> &Rope {
        &self.rope
    }

    /// Final-normed hidden states of the tokens of `pass`.
    ///
    /// # Shapes
    ///
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    ///
    /// Those of [`KvMemory::attend`].
    pub fn hidden(&self, ids: Tensor<2, Int>, mut pass: Pass<'_>) -> Result<Tensor<3>> {
        let (seq, max_positions) = (ids.dims()[1], self.config.max_positions);
        let rotation = pass.rotation(&self.rope, seq, max_positions, &ids.device());
        let mut x = self.embedding.forward(ids); // [batch, seq, hidden]
        for (i, layer) in self.layers.iter().enumerate() {
            x = layer.forward(x, &rotation, &self.config, pass.layer(i))?;
        }
        Ok(self.norm.forward(x))
    }

    /// Logits of final-normed hidden states.
    ///
    /// # Shapes
    ///
    /// - hidden: `[batch, seq, hidden]`
    /// - output: `[batch, seq, vocab]`
    pub fn head(&self, hidden: Tensor<3>) -> Tensor<3> {
        match &self.head {
            Some(head) => head.forward(hidden),
            None => project(hidden, self.embedding.weight.val()),
        }
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
    /// Those of [`KvMemory::attend`].
    pub fn forward(
        &self,
        x: Tensor<3>,
        rotation: &Rotation,
        config: &Config,
        memory: KvMemory<'_>,
    ) -> Result<Tensor<3>> {
        let qkv = by_rows(x.clone(), |x| self.qkv.forward(self.attention_norm.forward(x)));
        let heads = config.attention.attend(qkv, Some(rotation), memory)?;
        let x = x + self.output.forward(heads);
        Ok(by_rows(x, |x| x.clone() + self.mlp.forward(self.mlp_norm.forward(x))))
    }
}
