//! The arguments of attention, and what the units of a cube keep.

use cubecl::prelude::*;

use super::super::rows::RowArgs;
use crate::{formats::QuantSpec, kernels::head_rows};

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AttendBlueprint {
    pub(crate) width: usize,
    pub(crate) compresses: bool,
    pub(crate) selects: bool,
    /// True if a cube writes sums over its part of the rows, not outputs.
    pub(crate) partial: bool,
    pub(crate) spec: Option<QuantSpec>,
}

impl AttendBlueprint {
    /// Returns the number of channels of a unit.
    pub(crate) const fn own_channels(&self) -> usize {
        head_rows::own_channels(self.width)
    }
}

/// The buffers that a kernel reads.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Inputs<W: Float, R: Float> {
    /// `[batch, heads, tokens, width]`.
    pub(crate) query: Box<[f32]>,
    pub(crate) window: Box<[W]>,
    pub(crate) codes: Box<[u32]>,
    pub(crate) floats: Box<[R]>,
    pub(crate) selected: Box<[i32]>,
    pub(crate) sink_logits: Box<[f32]>,
    pub(crate) span: Box<[i32]>,
}

/// Run-time numbers of a launch.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct AttendArgs {
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) tokens: usize,
    /// Equal parts of a token's rows, each with its own cubes.
    pub(crate) parts: usize,
    pub(crate) top_k: usize,
    pub(crate) ratio: usize,
    pub(crate) sliding_window: usize,
    pub(crate) scale: f32,
    pub(crate) window: RowArgs,
    pub(crate) entries: RowArgs,
}

/// The rows of a token: recent tokens, then entries.
#[derive(CubeType)]
pub(crate) struct Seen {
    pub(crate) sequence: usize,
    pub(crate) token: usize,
    /// All rows; 0 for a token that is not part of the call.
    pub(crate) n: usize,
    /// The first row of the cube's part.
    pub(crate) begin: usize,
    /// The end of the cube's part.
    pub(crate) end: usize,
    /// The first recent token.
    pub(crate) first: usize,
    /// Recent tokens.
    pub(crate) recent: usize,
    /// The first of the token's selected entries.
    pub(crate) selection: usize,
}
