//! A pre-norm transformer with learned positions.

use burn::{
    module::Module,
    nn::{Embedding, LayerNorm},
    tensor::{Int, Tensor, activation},
};

use super::{Activation, Config};
use crate::{
    Result,
    nn::{KvMemory, Linear, Pass, by_rows, project},
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
        let positions = pass.rows(self.positions.weight.val(), ids.dims()[1]); // [seq, hidden]
        let mut x = self.embedding.forward(ids) + positions.unsqueeze();
        for (i, layer) in self.layers.iter().enumerate() {
            x = layer.forward(x, &self.config, pass.layer(i))?;
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
        config: &Config,
        memory: KvMemory<'_>,
    ) -> Result<Tensor<3>> {
        let qkv = by_rows(x.clone(), |x| self.qkv.forward(self.attention_norm.forward(x)));
        let heads = config.attention_shape().attend(qkv, None, memory)?;
        let x = x + self.output.forward(heads);

        Ok(by_rows(x, |x| {
            let up = self.up.forward(self.mlp_norm.forward(x.clone()));
            let up = match config.activation {
                Activation::GeluTanh => activation::gelu_approximate(up),
                Activation::Gelu => activation::gelu(up),
                Activation::Relu => activation::relu(up),
            };
            x + self.down.forward(up)
        }))
    }
}
