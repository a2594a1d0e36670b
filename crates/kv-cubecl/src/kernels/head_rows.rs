//! Parts of the kernels in which one row is key and value of all heads: sparse attention, and
//! attention over a cache whose values are channels of its keys.
//!
//! Each unit has every [`UNITS`]th channel of queries, rows and sums in registers, so that a row is
//! read once for its score and its sum. Products are summed over units through shared memory.

use cubecl::prelude::*;

/// Units of a cube.
pub(super) const UNITS: usize = 128;
/// Rows that are scored together.
pub(super) const TILE: usize = 4;
/// Heads, or query rows, of a cube.
pub(super) const HEADS: usize = 4;
/// Products of a tile: heads times rows.
pub(super) const PAIRS: usize = HEADS * TILE;
/// Units that share the sum of a product.
const LANES: usize = UNITS / PAIRS;
/// Numbers from one product to the next in shared memory. It is no multiple of the number of banks,
/// so that units that sum different products use different ones.
const STRIDE: usize = UNITS + LANES;
/// The largest width of rows whose numbers fit into the registers of units.
pub(super) const WIDEST: usize = 1024;
/// The score of no row; WGSL has no literal for infinity.
pub(super) const LOWEST: f32 = f32::MIN;

/// Returns the number of channels of a unit.
pub(super) const fn own_channels(width: usize) -> usize {
    width.div_ceil(UNITS)
}

/// Memory that the units of a cube share.
#[derive(CubeType)]
pub(super) struct Board {
    /// The products of the units' channels, `[PAIRS, STRIDE]`.
    partial: Shared<[f32]>,
    /// Sums over some of the units, `[PAIRS, LANES]`.
    lanes: Shared<[f32]>,
    /// Scores of the tile, `[HEADS, TILE]`.
    pub(super) scores: Shared<[f32]>,
    pub(super) unit: usize,
}

#[cube]
pub(super) fn new_board() -> Board {
    Board {
        partial: Shared::<[f32]>::new_slice(PAIRS * STRIDE),
        lanes: Shared::<[f32]>::new_slice(PAIRS * LANES),
        scores: Shared::<[f32]>::new_slice(PAIRS),
        unit: UNIT_POS as usize,
    }
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

#[cube]
pub(super) fn no_sums(#[comptime] own: usize) -> Sums {
    let mut sums = Sums {
        most: Array::<f32>::new(HEADS),
        weights: Array::<f32>::new(HEADS),
        rows: Array::<f32>::new(comptime!(HEADS * own)),
    };
    #[unroll]
    for h in 0..HEADS {
        sums.most[h] = f32::new(LOWEST);
        sums.weights[h] = f32::new(0.0);
        #[unroll]
        for i in 0..own {
            sums.rows[h * own + i] = f32::new(0.0);
        }
    }
    sums
}

/// Multiplies the rows of a tile with the queries of all heads, for [`product`]. Ends with a
/// barrier.
#[cube]
pub(super) fn multiply(
    queries: &Array<f32>,
    rows: &Array<f32>,
    board: &mut Board,
    #[comptime] own: usize,
) {
    let unit = board.unit;
    #[unroll]
    for h in 0..HEADS {
        #[unroll]
        for t in 0..TILE {
            let mut dot = f32::new(0.0);
            #[unroll]
            for i in 0..own {
                dot += queries[h * own + i] * rows[t * own + i];
            }
            board.partial[(h * TILE + t) * STRIDE + unit] = dot;
        }
    }
    sync_cube();
    let mut sum = f32::new(0.0);
    #[unroll]
    for i in 0..comptime!(UNITS / LANES) {
        sum += board.partial[unit / LANES * STRIDE + unit % LANES + i * LANES];
    }
    board.lanes[unit] = sum;
    sync_cube();
}

/// Returns product number `unit` of the tile, one of [`PAIRS`], of head `unit / TILE` and row
/// `unit % TILE`.
#[cube]
pub(super) fn product(board: &mut Board) -> f32 {
    let mut product = f32::new(0.0);
    #[unroll]
    for i in 0..LANES {
        product += board.lanes[board.unit * LANES + i];
    }
    product
}

/// Adds the weighted rows of the tile times `factor`, after all units have written its scores.
#[cube]
pub(super) fn add_rows(
    rows: &Array<f32>,
    board: &Board,
    sums: &mut Sums,
    #[comptime] factor: f32,
    #[comptime] own: usize,
) {
    #[unroll]
    for h in 0..HEADS {
        let mut largest = sums.most[h];
        #[unroll]
        for t in 0..TILE {
            largest = clamp_min(largest, board.scores[h * TILE + t]);
        }
        let kept = (sums.most[h] - largest).exp();
        sums.most[h] = largest;
        sums.weights[h] *= kept;
        #[unroll]
        for i in 0..own {
            sums.rows[h * own + i] *= kept;
        }
        #[unroll]
        for t in 0..TILE {
            let score = board.scores[h * TILE + t];
            // A NaN score must get weight NaN, so the test is not `score > LOWEST`.
            if score != f32::new(LOWEST) {
                let weight = (score - largest).exp();
                sums.weights[h] += weight;
                let scaled = weight * f32::new(factor);
                #[unroll]
                for i in 0..own {
                    sums.rows[h * own + i] += scaled * rows[t * own + i];
                }
            }
        }
    }
}
