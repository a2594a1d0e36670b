//! The attention of Gemma 4: norms of queries, keys and values, and a scale of 1.

use burn::{
    module::Module,
    tensor::{DType, Tensor},
};

use super::config::Config;
use crate::{
    decoder::Role,
    error::Result,
    nn::{Linear, RmsNorm, by_rows, norm_heads, unit_rms},
    spec::{heads, joined},
    stack::{LayerContext, LayerSource, LayerVisitor},
};

/// Attention with a cache of the layer's own, or to the cache of an earlier layer.
#[derive(Module, Debug)]
pub struct Attention {
    /// Query, key and value rows in one matrix: without values where keys are the values, and
    /// queries only in a layer that shares a cache.
    pub qkv: Linear,
    /// The norm of queries.
    pub query_norm: RmsNorm,
    /// The norm of keys; `None` in a layer that shares a cache.
    pub key_norm: Option<RmsNorm>,
    /// The output projection.
    pub output: Linear,
}

const QUERY_NORM: &str = "self_attn.q_norm";
const KEY_NORM: &str = "self_attn.k_norm";
const OUTPUT: &str = "self_attn.o_proj";

/// Returns the names and row counts of the projections of layer `index`.
fn qkv(config: &Config, index: usize) -> Vec<(&'static str, usize)> {
    let (head_dim, keys_are_values) = (config.head_dim(index), config.keys_are_values(index));
    let kv = config.n_kv_heads(index) * head_dim;
    let parts = [
        ("self_attn.q_proj", config.shared.n_heads * head_dim),
        ("self_attn.k_proj", kv),
        ("self_attn.v_proj", kv),
    ];
    let n = match config.owner(index) {
        Some(_) => 1,
        None if keys_are_values => 2,
        None => 3,
    };
    parts[..n].to_vec()
}

impl Attention {
    pub(super) fn build(config: &Config, source: &mut LayerSource<'_>) -> Result<Self> {
        let (index, shared) = (source.index(), &config.shared);
        let (width, head_dim) = (shared.hidden_size, config.head_dim(index));
        let owns = config.owner(index).is_none();
        let key_norm = owns.then(|| source.norm(KEY_NORM, head_dim)).transpose()?;
        let rows = shared.n_heads * head_dim;
        Ok(Self {
            qkv: source.fused(&qkv(config, index), width, shared.attention_bias)?,
            query_norm: source.norm(QUERY_NORM, head_dim)?,
            key_norm,
            output: source.residual(OUTPUT, [width, rows], shared.attention_bias)?,
        })
    }

    pub(super) fn visit(&self, config: &Config, index: usize, visitor: &mut LayerVisitor<'_>) {
        visitor.fused(Role::Qkv, &qkv(config, index), &self.qkv);
        visitor.linear(Role::AttentionOutput, OUTPUT, &self.output);
        visitor.norm(Role::AttentionNorm, QUERY_NORM, &self.query_norm);
        if let Some(norm) = &self.key_norm {
            visitor.norm(Role::AttentionNorm, KEY_NORM, norm);
        }
    }

    /// Applies attention to the `norm` of `x`, before the output projection.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden]`
    /// - output: `[batch, seq, n_heads * head_dim]`
    ///
    /// # Errors
    /// Fails as [`Memory::attend`](crate::nn::Memory::attend) does.
    pub fn attend(
        &self,
        x: Tensor<3>,
        norm: &RmsNorm,
        context: LayerContext<'_>,
    ) -> Result<Tensor<3>> {
        let LayerContext { rope, spec, memory, .. } = context;
        let (n_heads, n_kv, head_dim) = (spec.n_heads, spec.n_kv_heads, spec.head_dim.keys);
        let rows = by_rows(x, |x| self.qkv.forward_normed(x, norm));
        let all = heads(rows, self.qkv.weight.dims()[0] / head_dim, head_dim);
        let Some(key_norm) = &self.key_norm else {
            let q = self.query_norm.heads(all);
            let q = match rope {
                Some(rope) => rope.apply(q),
                None => q,
            };
            return Ok(joined(memory.attend_shared(q)?));
        };
        // Where keys are the values, the last heads are both.
        let values = all.dims()[1] - n_kv;
        let v = all.clone().narrow(1, values, n_kv);
        let dtype = v.dtype();
        let v = unit_rms(v.cast(DType::F32), key_norm.epsilon).cast(dtype);
        let qk = norm_heads(all.narrow(1, 0, n_heads + n_kv), n_heads, &self.query_norm, key_norm);
        spec.attend_heads(qk, v, rope, memory)
    }
}
