//! A pre-norm transformer with rotary positions, grouped-query attention and a gated MLP.

use burn::{
    module::Module,
    nn::{Embedding, RmsNorm},
    tensor::{Int, Tensor},
};
use kv_cubecl::KvCacheConfig;

use super::Config;
use crate::{
    ModelCache, Result,
    nn::{KvMemory, Linear, Rope, Rotation, SwiGlu, by_rows, project},
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
    /// The output projection; `None` when it is the embedding.
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
    /// Joins the heads.
    pub output: Linear,
    /// Norm before the MLP.
    pub mlp_norm: RmsNorm,
    /// The MLP.
    pub mlp: SwiGlu,
}

impl Llama {
    /// What the model was built from.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Final-normed hidden states of a whole sequence, in parallel.
    ///
    /// # Shapes
    ///
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    ///
    /// Those of [`KvMemory::attend`].
    pub fn hidden(&self, ids: Tensor<2, Int>, cache: &KvCacheConfig) -> Result<Tensor<3>> {
        let rotation = self.rope.rotation(0, ids.dims()[1], &ids.device());
        let mut x = self.embedding.forward(ids); // [batch, seq, hidden]
        for layer in &self.layers {
            x = layer.forward(x, &rotation, &self.config, KvMemory::Parallel(cache))?;
        }
        Ok(self.norm.forward(x))
    }

    /// Final-normed hidden states of the tokens that follow those in `cache`.
    ///
    /// # Shapes
    ///
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    ///
    /// Those of [`KvMemory::attend`].
    pub fn hidden_step(&self, ids: Tensor<2, Int>, cache: &mut ModelCache) -> Result<Tensor<3>> {
        let rotation = self.rope.rotation(cache.len(), ids.dims()[1], &ids.device());
        let mut x = self.embedding.forward(ids); // [batch, seq, hidden]
        for (layer, kv) in self.layers.iter().zip(&mut cache.layers) {
            x = layer.forward(x, &rotation, &self.config, KvMemory::Cached(kv))?;
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
