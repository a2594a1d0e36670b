//! Scores of keys for an indexer.

use cubecl::{client::Client, prelude::*};

use super::rows::{RowArgs, channel_at};
use crate::{
    Result,
    formats::QuantSpec,
    kernels::{Grid, Limits},
    sparse::RowLayout,
};

/// Units of a cube, each with a key.
const UNITS: usize = 64;

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
struct ScoreArgs {
    heads: usize,
    tokens: usize,
    n: usize,
    /// Cubes for the keys of a token.
    cubes: usize,
    /// Tokens of all sequences.
    rows: usize,
    keys: RowArgs,
}

/// One unit per token and key: the sum over heads of the weight times the ReLU of the product.
#[cube(launch, address_type = "dynamic")]
fn score_keys<R: Float>(
    query: &[f32],
    weights: &[f32],
    codes: &[u32],
    floats: &[R],
    scores: &mut [f32],
    args: ScoreArgs,
    #[comptime] width: usize,
    #[comptime] spec: Option<QuantSpec>,
    #[define(R)] _dtype: ElemType,
) {
    let (row, cube) = (CUBE_POS / args.cubes, CUBE_POS % args.cubes);
    let key = cube * UNITS + UNIT_POS as usize;
    if row < args.rows && key < args.n {
        let (sequence, token) = (row / args.tokens, row % args.tokens);
        let mut channels = Array::<f32>::new(width);
        #[unroll]
        for channel in 0..width {
            channels[channel] =
                channel_at::<R>(codes, floats, sequence, key, channel, &args.keys, spec);
        }
        let mut score = f32::new(0.0);
        for head in 0..args.heads {
            let at = ((sequence * args.heads + head) * args.tokens + token) * width;
            let mut dot = f32::new(0.0);
            #[unroll]
            for channel in 0..width {
                dot += query[at + channel] * channels[channel];
            }
            score += weights[row * args.heads + head] * clamp_min(dot, f32::new(0.0));
        }
        scores[row * args.n + key] = score;
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
    let cubes = n.div_ceil(UNITS).max(1);
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
        layout.width,
        layout.code_spec(),
        layout.format.float.elem(),
    );
    Ok(())
}
