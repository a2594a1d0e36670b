//! The attention of one layer, from its projection to the joined heads.

use burn::tensor::Tensor;

use super::LayerSpec;
use crate::{
    device_use::is_cpu,
    error::Result,
    nn::{Memory, QkNorms, RopeRows},
};

impl LayerSpec {
    /// Cuts `qkv` into heads, applies rope, attends, and joins the heads again.
    ///
    /// # Shapes
    /// - qkv: `[batch, seq, qkv_rows]`: queries, keys, values, head by head
    /// - output: `[batch, seq, n_heads * head_dim]`, with the head_dim of values
    ///
    /// # Errors
    /// Fails as [`Memory::attend`] does.
    pub fn attend(
        &self,
        qkv: Tensor<3>,
        rope: Option<&RopeRows>,
        memory: Memory<'_>,
    ) -> Result<Tensor<3>> {
        self.attend_normed(qkv, None, rope, memory)
    }

    /// Computes [`attend`](Self::attend) with norms on the heads of queries and keys before rope.
    ///
    /// # Errors
    /// Fails as [`Memory::attend`] does.
    pub fn attend_normed(
        &self,
        qkv: Tensor<3>,
        norms: Option<&QkNorms>,
        rope: Option<&RopeRows>,
        memory: Memory<'_>,
    ) -> Result<Tensor<3>> {
        let Self { n_heads, n_kv_heads, head_dim, .. } = *self;
        let n_qk = n_heads + n_kv_heads;
        let (qk, v) = if head_dim.keys == head_dim.values {
            // These are views of the projection; slices of its rows, as below, are copies.
            let all = heads(qkv, n_qk + n_kv_heads, head_dim.keys);
            (all.clone().narrow(1, 0, n_qk), all.narrow(1, n_qk, n_kv_heads))
        } else {
            let (qk_rows, v_rows) = (n_qk * head_dim.keys, n_kv_heads * head_dim.values);
            let v = qkv.clone().narrow(2, qk_rows, v_rows);
            let qk = qkv.narrow(2, 0, qk_rows);
            (heads(qk, n_qk, head_dim.keys), heads(v, n_kv_heads, head_dim.values))
        };
        let qk = match norms {
            Some(norms) => norms.forward(qk, n_heads),
            None => qk,
        };
        self.attend_heads(qk, copied_on_cpu(v), rope, memory)
    }

    /// Applies rope to the heads of queries and keys, attends, and joins the heads again.
    pub(crate) fn attend_heads(
        &self,
        qk: Tensor<4>,
        v: Tensor<4>,
        rope: Option<&RopeRows>,
        memory: Memory<'_>,
    ) -> Result<Tensor<3>> {
        let Self { n_heads, n_kv_heads, .. } = *self;
        let rope_table = rope.and_then(|rope| memory.rope_table(rope, qk.dtype()));
        let qk = match rope {
            Some(rope) if rope_table.is_none() => rope.apply(qk),
            _ => qk,
        };
        let q = qk.clone().narrow(1, 0, n_heads);
        let k = qk.narrow(1, n_heads, n_kv_heads);

        // [batch, n_heads, seq, head_dim]
        let out = match rope_table {
            Some(rope_table) => memory.attend_with_rope(q, k, v, rope_table)?,
            None => memory.attend(q, k, v)?,
        };
        Ok(joined(out))
    }
}

/// Cuts the rows of a projection into heads: `[batch, seq, heads * head_dim]` to `[batch, heads,
/// seq, head_dim]`.
pub(crate) fn heads(rows: Tensor<3>, heads: usize, head_dim: usize) -> Tensor<4> {
    let [batch, seq, _] = rows.dims();
    match seq {
        1 => rows.reshape([batch, heads, 1, head_dim]),
        _ => rows.reshape([batch, seq, heads, head_dim]).swap_dims(1, 2),
    }
}

/// Joins [`heads`] again.
pub(crate) fn joined(heads: Tensor<4>) -> Tensor<3> {
    let [batch, n_heads, seq, head_dim] = heads.dims();
    heads.swap_dims(1, 2).reshape([batch, seq, n_heads * head_dim])
}

/// Copies the values of a prompt on the CPU, where attention copies them anyway. A view would keep
/// the queries and keys before rope in memory.
fn copied_on_cpu(v: Tensor<4>) -> Tensor<4> {
    let [batch, heads, seq, width] = v.dims();
    match seq > 1 && is_cpu(&v.device()) {
        // Merging neighboring axes of a view copies it.
        true => v.reshape([batch, heads * seq * width]).reshape([batch, heads, seq, width]),
        false => v,
    }
}
