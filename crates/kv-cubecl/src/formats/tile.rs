//! [`Tile`]: the sizes of variance-normalized tiles.

use serde::{Deserialize, Serialize};

use crate::{Result, error::invalid};

/// The tiles of the formats `vn2` to `vn4`: the tokens that are normalized and quantized together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tile {
    /// Tokens of a tile: 64 or 128.
    pub tokens: usize,
    /// Number of updates of the scales of tokens and of channels in turn, at most 32.
    pub iterations: u32,
}

impl Default for Tile {
    /// Returns the tile of KVarN (2026, <https://arxiv.org/abs/2606.03458>).
    fn default() -> Self {
        Self::KVARN
    }
}

impl Tile {
    /// 128 tokens and 16 iterations.
    pub const KVARN: Self = Self { tokens: 128, iterations: 16 };

    pub(crate) fn validate(self) -> Result<()> {
        if !matches!(self.tokens, 64 | 128) {
            return Err(invalid("tile.tokens", self.tokens, "must be 64 or 128"));
        }
        // More would exceed the loop iterations that Mesa's software driver allows an invocation.
        if self.iterations > 32 {
            return Err(invalid("tile.iterations", self.iterations, "must be at most 32"));
        }
        Ok(())
    }
}
