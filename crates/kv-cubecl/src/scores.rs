//! From products of queries and keys to scores.

use core::f32::consts::LOG2_E;

/// The reciprocal of the most tokens that a cache holds. Sums of values whose weights are smaller
/// by this factor do not overflow, also near the largest f32.
#[cfg(any(feature = "flex", feature = "cube"))]
pub(crate) const DOWN: f32 = 1.0 / (1 << 24) as f32;

/// Scale and soft cap of the product of a query and a key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scores {
    /// Factor on the product.
    pub(crate) scale: f32,
    /// Bound on the scaled score:
    pub(crate) softcap: Option<f32>,
}

impl Scores {
    /// Products as they are.
    #[cfg(feature = "cube")]
    pub(crate) const PLAIN: Self = Self { scale: 1.0, softcap: None };

    /// Returns the same options for scores to base 2, `log2 e` times as large: powers of 2 are
    /// cheaper than powers of e.
    pub(crate) fn base_2(self) -> Self {
        Self { scale: LOG2_E * self.scale, softcap: self.softcap.map(|cap| LOG2_E * cap) }
    }
}
