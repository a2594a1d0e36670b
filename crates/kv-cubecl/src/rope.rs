//! Rotary position encoding (rope) as a table.

use burn::tensor::{DType, Tensor};

use crate::{Error, Result};

/// Table for rotary position encoding (Su et al., 2021, <https://arxiv.org/abs/2104.09864>) in its
/// half-split form.
///
/// At position `p`, channels `i` and `i + rotary_dim / 2` of a head are rotated by an angle whose
/// cosine and sine are in the table. Channels from `rotary_dim` on stay unchanged.
///
/// A cache with a table applies rope to query and key inside the launches of a step; see
/// [`KvCache::attend_with_rope`](crate::KvCache::attend_with_rope).
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
