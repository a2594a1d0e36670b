//! Attention whose output has a gate.

use burn::{
    module::Module,
    tensor::{Tensor, activation},
};

use crate::{
    decoder::Role,
    error::Result,
    llama::QK_NORMS,
    nn::{Linear, QkNorms, RmsNorm, by_rows},
    spec::LayerSpec,
    stack::{LayerContext, LayerSource, LayerVisitor},
};

/// Attention with norms of queries and keys, and a gate for every channel of the output
/// (<https://arxiv.org/abs/2505.06708>).
#[derive(Module, Debug)]
pub struct GatedAttention {
    /// The query and the gate of each head in turn, then keys, then values.
    pub qkv: Linear,
    /// Norms of the heads of queries and keys.
    pub qk_norms: QkNorms,
    /// The output projection.
    pub output: Linear,
}

const OUTPUT: &str = "self_attn.o_proj";

fn parts(spec: &LayerSpec) -> [(&'static str, usize); 3] {
    let (queries, keys) = (spec.n_heads * spec.head_dim.keys, spec.n_kv_heads * spec.head_dim.keys);
    let [q, k, v] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
    [(q, 2 * queries), (k, keys), (v, keys)]
}

impl GatedAttention {
    pub(super) fn build(
        spec: &LayerSpec,
        hidden: usize,
        source: &mut LayerSource<'_>,
    ) -> Result<Self> {
        let heads = spec.n_heads * spec.head_dim.values;
        let [query, key] = QK_NORMS;
        Ok(Self {
            qkv: source.fused(&parts(spec), hidden, false)?,
            qk_norms: QkNorms {
                query: source.norm_plus_one(query, spec.head_dim.keys)?,
                key: source.norm_plus_one(key, spec.head_dim.keys)?,
            },
            output: source.residual(OUTPUT, [hidden, heads], false)?,
        })
    }

    pub(super) fn visit(&self, spec: &LayerSpec, visitor: &mut LayerVisitor<'_>) {
        visitor.fused(Role::Qkv, &parts(spec), &self.qkv);
        visitor.qk_norms(Role::AttentionNorm, QK_NORMS, &self.qk_norms);
        visitor.linear(Role::AttentionOutput, OUTPUT, &self.output);
    }

    /// Applies the layer and adds the result to its input.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden]`
    /// - output: the same
    ///
    /// # Errors
    /// Fails as [`Memory::attend`](crate::nn::Memory::attend) does.
    pub fn forward(
        &self,
        x: Tensor<3>,
        norm: &RmsNorm,
        context: LayerContext<'_>,
    ) -> Result<Tensor<3>> {
        let [batch, seq, _] = x.dims();
        let (heads, dim) = (context.spec.n_heads, context.spec.head_dim.keys);
        let queries = heads * dim;
        let projected = by_rows(x.clone(), |x| self.qkv.forward_normed(x, norm));
        let keys_values = projected.dims()[2] - 2 * queries;
        let pairs = projected.clone().narrow(2, 0, 2 * queries);
        let pairs = pairs.reshape([batch, seq, heads, 2 * dim]);
        let half = |first| -> Tensor<3> {
            pairs.clone().narrow(3, first, dim).reshape([batch, seq, queries])
        };
        let (query, gate) = (half(0), half(dim));
        let qkv = Tensor::cat(vec![query, projected.narrow(2, 2 * queries, keys_values)], 2);
        let attended = context.attend(qkv, Some(&self.qk_norms))?;
        Ok(self.output.forward_added(attended * activation::sigmoid(gate), x))
    }
}
