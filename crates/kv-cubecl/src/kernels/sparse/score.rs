//! Scores of keys for an indexer.

use cubecl::{client::Client, prelude::*};

use super::rows::{RowArgs, channel_at};
use crate::{
    Result,
    formats::QuantSpec,
    kernels::{Grid, Limits},
    sparse::RowLayout,
};

/// Units of a cube along the heads, and along the keys.
const SIDE: usize = 8;
/// Units of a cube.
pub(super) const UNITS: usize = SIDE * SIDE;
/// Keys of a unit.
const OWN_KEYS: usize = 8;
/// Keys of a cube.
const KEYS: usize = SIDE * OWN_KEYS;
/// The most heads of a unit at a time. Its products are in registers: one per head and key.
const MOST_HEADS: usize = 8;
/// Channels that are in shared memory at a time.
const RUN: usize = 16;

/// Sizes of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScoreProblem {
    /// The store of keys.
    pub(crate) layout: RowLayout,
    /// Heads of a query.
    pub(crate) heads: usize,
    /// Tokens of the call.
    pub(crate) tokens: usize,
    /// Keys.
    pub(crate) n: usize,
}

/// Run-time numbers of a launch.
#[derive(CubeType, CubeLaunch)]
pub(super) struct ScoreArgs {
    heads: usize,
    tokens: usize,
    n: usize,
    /// Cubes for the keys of a token.
    cubes: usize,
    /// Tokens of all sequences.
    rows: usize,
    keys: RowArgs,
}

/// A run of channels of all keys of a cube, and of its heads' queries. Channels are apart by one
/// number more than a channel has, so that units that store neighboring channels use different
/// banks of shared memory.
#[derive(CubeType)]
struct Tile {
    /// `[RUN, KEYS + 1]`.
    keys: Shared<[f32]>,
    /// `[RUN, heads + 1]`.
    queries: Shared<[f32]>,
    /// The place of the unit along the heads.
    along_heads: usize,
    /// The place of the unit along the keys.
    along_keys: usize,
}

/// The token and the keys of a cube.
#[derive(CubeType)]
struct Place {
    sequence: usize,
    token: usize,
    first_key: usize,
}

/// One cube per token and [`KEYS`] keys: the sum over heads of the weight times the ReLU of the
/// product of query and key.
///
/// Each number that a unit reads from shared memory serves all its heads, or all its keys.
#[cube(launch, address_type = "dynamic")]
pub(super) fn score_keys<R: Float>(
    query: &[f32],
    weights: &[f32],
    codes: &[u32],
    floats: &[R],
    scores: &mut [f32],
    args: ScoreArgs,
    #[comptime] own_heads: usize,
    #[comptime] spec: Option<QuantSpec>,
    #[define(R)] _dtype: ElemType,
) {
    let (row, cube) = (CUBE_POS / args.cubes, CUBE_POS % args.cubes);
    if row >= args.rows {
        terminate!();
    }
    let (sequence, token) = (row / args.tokens, row % args.tokens);
    let place = Place { sequence, token, first_key: cube * KEYS };
    let unit = UNIT_POS as usize;
    let mut tile = Tile {
        keys: Shared::<[f32]>::new_slice(RUN * (KEYS + 1)),
        queries: Shared::<[f32]>::new_slice(comptime!(RUN * (SIDE * own_heads + 1))),
        along_heads: unit / SIDE,
        along_keys: unit % SIDE,
    };
    let mut sums = Array::<f32>::new(OWN_KEYS);
    #[unroll]
    for k in 0..OWN_KEYS {
        sums[k] = f32::new(0.0);
    }
    let mut first_head = 0usize;
    while first_head < args.heads {
        let mut products = Array::<f32>::new(comptime!(own_heads * OWN_KEYS));
        #[unroll]
        for i in 0..comptime!(own_heads * OWN_KEYS) {
            products[i] = f32::new(0.0);
        }
        let mut channel = 0usize;
        while channel < args.keys.width {
            load_keys::<R>(codes, floats, channel, &place, &mut tile, &args, spec);
            load_queries(query, first_head, channel, &place, &mut tile, &args, own_heads);
            sync_cube();
            multiply(&tile, &mut products, own_heads);
            sync_cube();
            channel += RUN;
        }
        #[unroll]
        for h in 0..own_heads {
            let head = first_head + h * SIDE + tile.along_heads;
            if head < args.heads {
                let weight = weights[row * args.heads + head];
                #[unroll]
                for k in 0..OWN_KEYS {
                    let product = products[h * OWN_KEYS + k];
                    sums[k] += weight * clamp_min(product, f32::new(0.0));
                }
            }
        }
        first_head += comptime!(SIDE * own_heads);
    }
    // Each unit has the sums of its heads; a key is summed over the units along the heads.
    #[unroll]
    for k in 0..OWN_KEYS {
        tile.keys[tile.along_heads * KEYS + k * SIDE + tile.along_keys] = sums[k];
    }
    sync_cube();
    let key = place.first_key + unit;
    if key < args.n {
        let mut score = f32::new(0.0);
        #[unroll]
        for i in 0..SIDE {
            score += tile.keys[i * KEYS + unit];
        }
        scores[row * args.n + key] = score;
    }
}

/// Restores the channels from `channel` on of the cube's keys; 0 for what does not exist.
#[cube]
fn load_keys<R: Float>(
    codes: &[u32],
    floats: &[R],
    channel: usize,
    place: &Place,
    tile: &mut Tile,
    args: &ScoreArgs,
    #[comptime] spec: Option<QuantSpec>,
) {
    let mut i = UNIT_POS as usize;
    while i < KEYS * RUN {
        let (key, c) = (place.first_key + i / RUN, channel + i % RUN);
        let mut x = f32::new(0.0);
        if key < args.n && c < args.keys.width {
            x = channel_at::<R>(codes, floats, place.sequence, key, c, &args.keys, spec);
        }
        tile.keys[i % RUN * (KEYS + 1) + i / RUN] = x;
        i += UNITS;
    }
}

/// Copies the channels from `channel` on of the queries from `first_head` on; 0 for what does not
/// exist.
#[cube]
fn load_queries(
    query: &[f32],
    first_head: usize,
    channel: usize,
    place: &Place,
    tile: &mut Tile,
    args: &ScoreArgs,
    #[comptime] own_heads: usize,
) {
    let width = args.keys.width;
    let mut i = UNIT_POS as usize;
    while i < comptime!(SIDE * own_heads * RUN) {
        let (head, c) = (first_head + i / RUN, channel + i % RUN);
        let mut x = f32::new(0.0);
        if head < args.heads && c < width {
            let at = (place.sequence * args.heads + head) * args.tokens + place.token;
            x = query[at * width + c];
        }
        tile.queries[i % RUN * comptime!(SIDE * own_heads + 1) + i / RUN] = x;
        i += UNITS;
    }
}

/// Adds the products of the tile's channels.
#[cube]
fn multiply(tile: &Tile, products: &mut Array<f32>, #[comptime] own_heads: usize) {
    for c in 0..RUN {
        let mut keys = Array::<f32>::new(OWN_KEYS);
        #[unroll]
        for k in 0..OWN_KEYS {
            keys[k] = tile.keys[c * (KEYS + 1) + k * SIDE + tile.along_keys];
        }
        #[unroll]
        for h in 0..own_heads {
            let query =
                tile.queries[c * comptime!(SIDE * own_heads + 1) + h * SIDE + tile.along_heads];
            #[unroll]
            for k in 0..OWN_KEYS {
                products[h * OWN_KEYS + k] += query * keys[k];
            }
        }
    }
}

/// Computes [`SparseOps::score_keys`](crate::sparse::SparseOps::score_keys).
pub(crate) fn launch_scores(
    client: &Client,
    [query, weights, codes, floats, scores]: [BufferArg; 5],
    problem: &ScoreProblem,
) -> Result<()> {
    let ScoreProblem { layout, heads, tokens, n } = *problem;
    let rows = layout.batch * tokens;
    let cubes = n.div_ceil(KEYS).max(1);
    let elements = layout.elements().max(rows * n).max(rows * heads * layout.width);
    let limits = Limits::of(client.properties());
    let grid = Grid::new("score_keys", [rows * cubes, 1, 1], UNITS, elements, &limits)?;
    score_keys::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        query,
        weights,
        codes,
        floats,
        scores,
        ScoreArgsLaunch::new(heads, tokens, n, cubes, rows, layout.args()),
        heads.div_ceil(SIDE).clamp(1, MOST_HEADS),
        layout.code_spec(),
        layout.format.float.elem(),
    );
    Ok(())
}
