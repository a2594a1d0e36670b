//! The arguments of attention, and what the units of a cube keep.

use cubecl::prelude::*;

use super::super::rows::RowArgs;
use crate::formats::QuantSpec;

/// Units of a cube.
pub(crate) const UNITS: usize = 128;
/// Rows that are scored together.
pub(crate) const TILE: usize = 4;
/// Heads of a cube.
pub(crate) const HEADS: usize = 4;
/// Products of a tile: heads times rows.
pub(crate) const PAIRS: usize = HEADS * TILE;
/// Units that share the sum of a product.
pub(crate) const LANES: usize = UNITS / PAIRS;
/// Numbers from one product to the next in shared memory. It is no multiple of the number of banks,
/// so that units that sum different products use different ones.
pub(crate) const STRIDE: usize = UNITS + LANES;
/// The largest width of rows whose numbers fit into the registers of units.
pub(crate) const WIDEST: usize = 1024;
/// The score of no row; WGSL has no literal for infinity.
pub(crate) const LOWEST: f32 = f32::MIN;

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
        self.width.div_ceil(UNITS)
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

/// Memory that the units of a cube share.
#[derive(CubeType)]
pub(crate) struct Board {
    /// The products of the units' channels, `[PAIRS, STRIDE]`.
    pub(crate) partial: Shared<[f32]>,
    /// Sums over some of the units, `[PAIRS, LANES]`.
    pub(crate) lanes: Shared<[f32]>,
    /// Scores of the tile, `[HEADS, TILE]`.
    pub(crate) scores: Shared<[f32]>,
    pub(crate) unit: usize,
}

/// The sums of a unit over the rows so far: it has all heads, and every `UNITS`th channel.
#[derive(CubeType)]
pub(crate) struct Sums {
    /// The largest score of each head.
    pub(crate) most: Array<f32>,
    /// The sum of each head's weights.
    pub(crate) weights: Array<f32>,
    /// The weighted sums of channels, `[HEADS, channels of a unit]`.
    pub(crate) rows: Array<f32>,
}
