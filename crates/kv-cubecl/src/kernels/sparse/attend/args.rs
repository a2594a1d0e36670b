//! The arguments of attention, and what the units of a cube keep.

use cubecl::prelude::*;

use super::super::rows::RowArgs;
use crate::formats::QuantSpec;

/// Units of a cube.
pub(super) const UNITS: usize = 128;
/// Rows that are scored together.
pub(super) const TILE: usize = 4;
/// Heads of a cube.
pub(super) const HEADS: usize = 4;
/// Products of a tile: heads times rows.
pub(super) const PAIRS: usize = HEADS * TILE;
/// Units that share the sum of a product.
pub(super) const LANES: usize = UNITS / PAIRS;
/// Numbers from one product to the next in shared memory. It is no multiple of the number of banks,
/// so that units that sum different products use different ones.
pub(super) const STRIDE: usize = UNITS + LANES;
/// The largest width of rows whose numbers fit into the registers of units.
pub(super) const WIDEST: usize = 1024;
/// The score of no row; WGSL has no literal for infinity.
pub(super) const LOWEST: f32 = f32::MIN;

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AttendBlueprint {
    pub(super) width: usize,
    pub(super) compresses: bool,
    pub(super) selects: bool,
    /// True if a cube writes sums over its part of the rows, not outputs.
    pub(super) partial: bool,
    pub(super) spec: Option<QuantSpec>,
}

impl AttendBlueprint {
    /// Returns the number of channels of a unit.
    pub(super) const fn own_channels(&self) -> usize {
        self.width.div_ceil(UNITS)
    }
}

/// The buffers that a kernel reads.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Inputs<W: Float, R: Float> {
    /// `[batch, heads, tokens, width]`.
    pub(super) query: Box<[f32]>,
    pub(super) window: Box<[W]>,
    pub(super) codes: Box<[u32]>,
    pub(super) floats: Box<[R]>,
    pub(super) selected: Box<[i32]>,
    pub(super) sink_logits: Box<[f32]>,
    pub(super) span: Box<[i32]>,
}

/// Run-time numbers of a launch.
#[derive(CubeType, CubeLaunch)]
pub(super) struct AttendArgs {
    pub(super) batch: usize,
    pub(super) heads: usize,
    pub(super) tokens: usize,
    /// Equal parts of a token's rows, each with its own cubes.
    pub(super) parts: usize,
    pub(super) top_k: usize,
    pub(super) ratio: usize,
    pub(super) sliding_window: usize,
    pub(super) scale: f32,
    pub(super) window: RowArgs,
    pub(super) entries: RowArgs,
}

/// The rows of a token: recent tokens, then entries.
#[derive(CubeType)]
pub(super) struct Seen {
    pub(super) sequence: usize,
    pub(super) token: usize,
    /// All rows; 0 for a token that is not part of the call.
    pub(super) n: usize,
    /// The first row of the cube's part.
    pub(super) begin: usize,
    /// The end of the cube's part.
    pub(super) end: usize,
    /// The first recent token.
    pub(super) first: usize,
    /// Recent tokens.
    pub(super) recent: usize,
    /// The first of the token's selected entries.
    pub(super) selection: usize,
}

/// Memory that the units of a cube share.
#[derive(CubeType)]
pub(super) struct Board {
    /// The products of the units' channels, `[PAIRS, STRIDE]`.
    pub(super) partial: Shared<[f32]>,
    /// Sums over some of the units, `[PAIRS, LANES]`.
    pub(super) lanes: Shared<[f32]>,
    /// Scores of the tile, `[HEADS, TILE]`.
    pub(super) scores: Shared<[f32]>,
    pub(super) unit: usize,
}

/// The sums of a unit over the rows so far: it has all heads, and every `UNITS`th channel.
#[derive(CubeType)]
pub(super) struct Sums {
    /// The largest score of each head.
    pub(super) most: Array<f32>,
    /// The sum of each head's weights.
    pub(super) weights: Array<f32>,
    /// The weighted sums of channels, `[HEADS, channels of a unit]`.
    pub(super) rows: Array<f32>,
}
