//! Rotary position encoding (rope) as a table.

use burn::tensor::{DType, Int, Tensor};

use crate::{Error, Result, functions::floats};

/// Table for rotary position encoding (Su et al., 2021, <https://arxiv.org/abs/2104.09864>) in its
/// half-split form.
///
/// At position `p`, channels `i` and `i + rotary_dim / 2` of a head are rotated by an angle whose
/// cosine and sine are in the table. Channels from `rotary_dim` on stay unchanged.
///
/// A cache with a table applies rope to query and key inside the launches that append and attend;
/// see [`KvCache::attend_with_rope`](crate::KvCache::attend_with_rope).
#[derive(Clone, Debug)]
pub struct RopeTable {
    table: Tensor<2>,
}

impl RopeTable {
    /// Takes the table, f32 `[positions, rotary_dim]`: of each position the cosines of all pairs of
    /// channels, then their sines.
    ///
    /// # Errors
    /// [`Error::Shape`] for no position, no channel or an odd number of channels, or another type
    /// than f32.
    pub fn new(table: Tensor<2>) -> Result<Self> {
        let [positions, rotary_dim] = table.dims();
        let dtype = table.dtype();
        if positions == 0 || rotary_dim == 0 || rotary_dim % 2 == 1 || dtype != DType::F32 {
            let rule = format!(
                "must be [positions, rotary_dim] of F32, not of {dtype:?}, with pairs of channels"
            );
            let shape = table.dims().to_vec();
            return Err(Error::Shape { op: "rope", tensor: "table", shape, rule });
        }
        Ok(Self { table })
    }

    /// Applies rope to the rows of `x`, one token per sequence `[batch, heads, 1, head_dim]`, by
    /// their sequence's position.
    pub(crate) fn apply_rope(&self, x: Tensor<4>, positions: &Tensor<1, Int>) -> Tensor<4> {
        let (last, half) = (self.positions() as i32 - 1, self.rotary_dim() / 2);
        let angles = self.table.clone().select(0, positions.clone().clamp(0, last));
        let [n, _] = angles.dims();
        let part = |first| angles.clone().narrow(1, first, half).reshape([n, 1, 1, half]);
        let (cos, sin) = (part(0), part(half));
        let x = floats(x);
        let rest = x.dims()[3] - 2 * half;
        let (a, b) = (x.clone().narrow(3, 0, half), x.clone().narrow(3, half, half));
        let mut parts = vec![a.clone() * cos.clone() - b.clone() * sin.clone(), b * cos + a * sin];
        if rest > 0 {
            parts.push(x.narrow(3, 2 * half, rest));
        }
        Tensor::cat(parts, 3)
    }

    /// The table.
    pub fn table(&self) -> &Tensor<2> {
        &self.table
    }

    /// Positions that the table has.
    pub fn positions(&self) -> usize {
        self.table.dims()[0]
    }

    /// Channels of a head that turn.
    pub fn rotary_dim(&self) -> usize {
        self.table.dims()[1]
    }
}
