//! Attention of the heads of a token to recent tokens and entries, in one softmax.

use cubecl::{client::Client, prelude::*};

use super::rows::{RowArgs, added, channel_at};
use crate::{
    Result,
    formats::QuantSpec,
    kernels::{Grid, Limits},
    sparse::AttendPlan,
};

/// Units of a cube.
const UNITS: usize = 128;
/// Rows that are restored together.
const TILE: usize = 4;
/// Heads of a cube.
const HEADS: usize = 4;
/// Units that share the product of a head and a row.
const LANES: usize = UNITS / (TILE * HEADS);
/// The largest width of rows whose tile fits into shared memory.
const WIDEST: usize = 768;
/// The score of no row; WGSL has no literal for infinity.
const LOWEST: f32 = f32::MIN;

/// The buffers of a launch.
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
pub(crate) struct AttendBindings {
    pub(crate) query: BufferArg,
    pub(crate) window: BufferArg,
    pub(crate) codes: BufferArg,
    pub(crate) floats: BufferArg,
    pub(crate) selected: BufferArg,
    pub(crate) sink_logits: BufferArg,
    pub(crate) span: BufferArg,
    pub(crate) output: BufferArg,
}

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct AttendBlueprint {
    width: usize,
    compresses: bool,
    selects: bool,
    spec: Option<QuantSpec>,
}

impl AttendBlueprint {
    /// Returns the number of channels of a unit.
    const fn own_channels(&self) -> usize {
        self.width.div_ceil(UNITS)
    }
}

/// The buffers that a kernel reads.
#[derive(CubeType, CubeLaunch)]
struct Inputs<W: Float, R: Float> {
    /// `[batch, heads, tokens, width]`.
    query: Box<[f32]>,
    window: Box<[W]>,
    codes: Box<[u32]>,
    floats: Box<[R]>,
    selected: Box<[i32]>,
    sink_logits: Box<[f32]>,
    span: Box<[i32]>,
}

/// Run-time numbers of a launch.
#[derive(CubeType, CubeLaunch)]
struct AttendArgs {
    batch: usize,
    heads: usize,
    tokens: usize,
    top_k: usize,
    ratio: usize,
    sliding_window: usize,
    scale: f32,
    window: RowArgs,
    entries: RowArgs,
}

/// The rows of a token: recent tokens, then entries.
#[derive(CubeType)]
struct Seen {
    sequence: usize,
    token: usize,
    /// All rows; 0 for a token that is not part of the call.
    n: usize,
    /// The first recent token.
    first: usize,
    /// Recent tokens.
    recent: usize,
    /// The first of the token's selected entries.
    selection: usize,
}

/// Memory that the units of a cube share.
#[derive(CubeType)]
struct Board {
    /// Restored rows, `[TILE, width]`.
    tile: Shared<[f32]>,
    /// 1 for a row of the tile that exists, otherwise 0.
    exists: Shared<[u32]>,
    /// Parts of the products.
    partial: Shared<[f32]>,
    /// Scores of the tile, `[HEADS, TILE]`.
    scores: Shared<[f32]>,
    unit: usize,
}

/// The sums of a unit over the rows so far: it has all heads, and every `UNITS`th channel.
#[derive(CubeType)]
struct Sums {
    /// The largest score of each head.
    most: Array<f32>,
    /// The sum of each head's weights.
    weights: Array<f32>,
    /// The weighted sums of channels, `[HEADS, channels of a unit]`.
    rows: Array<f32>,
}

/// One cube per token and group of heads.
#[cube(launch, address_type = "dynamic")]
fn attend_rows<W: Float, R: Float>(
    inputs: Inputs<W, R>,
    output: &mut [f32],
    args: AttendArgs,
    #[comptime] bp: AttendBlueprint,
    #[define(W)] _window_type: ElemType,
    #[define(R)] _entry_type: ElemType,
) {
    let groups = args.heads.div_ceil(HEADS);
    let cube = CUBE_POS;
    if cube >= args.batch * args.tokens * groups {
        terminate!();
    }
    let (row, first_head) = (cube / groups, cube % groups * HEADS);
    let seen = rows_of(&inputs.span, row, &args, bp);
    let mut board = Board {
        tile: Shared::<[f32]>::new_slice(comptime!(TILE * bp.width)),
        exists: Shared::<[u32]>::new_slice(TILE),
        partial: Shared::<[f32]>::new_slice(UNITS),
        scores: Shared::<[f32]>::new_slice(comptime!(TILE * HEADS)),
        unit: UNIT_POS as usize,
    };
    let mut sums = no_sums(bp);
    let mut first = 0usize;
    while first < seen.n {
        load_tile::<W, R>(&inputs, first, &seen, &mut board, &args, bp);
        score_tile::<W, R>(&inputs, first_head, &seen, &mut board, &args, bp);
        add_tile(&board, &mut sums, bp);
        sync_cube();
        first += TILE;
    }
    write_heads(output, &inputs.sink_logits, first_head, &seen, &board, &sums, &args, bp);
}

/// Returns the rows that a token sees. `row` counts the tokens of all sequences.
#[cube]
fn rows_of(span: &[i32], row: usize, args: &AttendArgs, #[comptime] bp: AttendBlueprint) -> Seen {
    let (sequence, token) = (row / args.tokens, row % args.tokens);
    let call = added(span, sequence, args.batch);
    let mut n = 0usize;
    let mut first = 0usize;
    let mut recent = 0usize;
    if token < call.count {
        let position = call.start + token;
        recent = clamp_max(position + 1, args.sliding_window);
        first = position + 1 - recent;
        n = recent;
        if comptime!(bp.selects) {
            n += args.top_k;
        } else if comptime!(bp.compresses) {
            n += (position + 1) / args.ratio;
        }
    }
    Seen { sequence, token, n, first, recent, selection: row * args.top_k }
}

#[cube]
fn no_sums(#[comptime] bp: AttendBlueprint) -> Sums {
    let own = comptime!(bp.own_channels());
    let mut sums = Sums {
        most: Array::<f32>::new(HEADS),
        weights: Array::<f32>::new(HEADS),
        rows: Array::<f32>::new(comptime!(HEADS * bp.own_channels())),
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

/// Restores the rows from the `first` of a token on. Ends with a barrier.
#[cube]
fn load_tile<W: Float, R: Float>(
    inputs: &Inputs<W, R>,
    first: usize,
    seen: &Seen,
    board: &mut Board,
    args: &AttendArgs,
    #[comptime] bp: AttendBlueprint,
) {
    let width = comptime!(bp.width);
    let selected = &inputs.selected;
    if board.unit < TILE {
        board.exists[board.unit] = row_exists(selected, first + board.unit, seen, bp);
    }
    let mut i = board.unit;
    while i < comptime!(TILE * bp.width) {
        let (nth, channel) = (first + i / width, i % width);
        let mut x = f32::new(0.0);
        if row_exists(selected, nth, seen, bp) == 1u32 {
            if nth < seen.recent {
                let slot = (seen.first + nth) % args.window.slots;
                let row = seen.sequence * args.window.slots + slot;
                x = f32::cast_from(inputs.window[row * width + channel]);
            } else {
                let mut slot = nth - seen.recent;
                if comptime!(bp.selects) {
                    slot = selected[seen.selection + slot] as usize;
                }
                x = channel_at::<R>(
                    &inputs.codes,
                    &inputs.floats,
                    seen.sequence,
                    slot,
                    channel,
                    &args.entries,
                    bp.spec,
                );
            }
        }
        board.tile[i] = x;
        i += UNITS;
    }
    sync_cube();
}

/// Computes the scores of the tile for the heads from `first_head` on. Ends with a barrier.
#[cube]
fn score_tile<W: Float, R: Float>(
    inputs: &Inputs<W, R>,
    first_head: usize,
    seen: &Seen,
    board: &mut Board,
    args: &AttendArgs,
    #[comptime] bp: AttendBlueprint,
) {
    let width = comptime!(bp.width);
    let unit = board.unit;
    let pair = unit / LANES;
    // Heads past the last repeat it; they are not written.
    let head = clamp_max(first_head + pair / TILE, args.heads - 1);
    let query = ((seen.sequence * args.heads + head) * args.tokens + seen.token) * width;
    let mut dot = f32::new(0.0);
    let mut channel = unit % LANES;
    while channel < width {
        dot += inputs.query[query + channel] * board.tile[pair % TILE * width + channel];
        channel += LANES;
    }
    board.partial[unit] = dot;
    sync_cube();
    if unit < comptime!(TILE * HEADS) {
        let mut score = f32::new(0.0);
        #[unroll]
        for i in 0..LANES {
            score += board.partial[unit * LANES + i];
        }
        score *= args.scale;
        if board.exists[unit % TILE] == 0u32 {
            score = f32::new(LOWEST);
        }
        board.scores[unit] = score;
    }
    sync_cube();
}

/// Adds the weighted rows of the tile.
#[cube]
fn add_tile(board: &Board, sums: &mut Sums, #[comptime] bp: AttendBlueprint) {
    let (width, own) = comptime!((bp.width, bp.own_channels()));
    #[unroll]
    for h in 0..HEADS {
        let mut largest = sums.most[h];
        #[unroll]
        for t in 0..TILE {
            largest = clamp_min(largest, board.scores[h * TILE + t]);
        }
        let factor = (sums.most[h] - largest).exp();
        sums.most[h] = largest;
        sums.weights[h] *= factor;
        #[unroll]
        for i in 0..own {
            sums.rows[h * own + i] *= factor;
        }
        #[unroll]
        for t in 0..TILE {
            let score = board.scores[h * TILE + t];
            if score > f32::new(LOWEST) {
                let weight = (score - largest).exp();
                sums.weights[h] += weight;
                #[unroll]
                for i in 0..own {
                    let channel = board.unit + i * UNITS;
                    if channel < width {
                        sums.rows[h * own + i] += weight * board.tile[t * width + channel];
                    }
                }
            }
        }
    }
}

/// Adds the sinks to the sums of weights, divides, and writes the unit's channels.
#[cube]
fn write_heads(
    output: &mut [f32],
    sink_logits: &[f32],
    first_head: usize,
    seen: &Seen,
    board: &Board,
    sums: &Sums,
    args: &AttendArgs,
    #[comptime] bp: AttendBlueprint,
) {
    let (width, own) = comptime!((bp.width, bp.own_channels()));
    #[unroll]
    for h in 0..HEADS {
        let head = first_head + h;
        if head < args.heads {
            let sink = sink_logits[head];
            let base = clamp_min(sums.most[h], sink);
            let factor = (sums.most[h] - base).exp();
            let mut sum = sums.weights[h] * factor;
            // No sink is the lowest number.
            if sink > f32::new(LOWEST) {
                sum += (sink - base).exp();
            }
            let at = ((seen.sequence * args.heads + head) * args.tokens + seen.token) * width;
            #[unroll]
            for i in 0..own {
                let channel = board.unit + i * UNITS;
                if channel < width {
                    let mut x = f32::new(0.0);
                    if seen.n > 0 {
                        x = sums.rows[h * own + i] * factor / sum;
                    }
                    output[at + channel] = x;
                }
            }
        }
    }
}

/// Returns 1 if the `nth` row of a token exists: selections may be shorter than their buffer.
#[cube]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
fn row_exists(selected: &[i32], nth: usize, seen: &Seen, #[comptime] bp: AttendBlueprint) -> u32 {
    let mut exists = 0u32;
    if nth < seen.n {
        exists = 1u32;
        if comptime!(bp.selects) {
            if nth >= seen.recent {
                if selected[seen.selection + nth - seen.recent] < 0i32 {
                    exists = 0u32;
                }
            }
        }
    }
    exists
}

/// Computes [`SparseOps::attend_rows`](crate::sparse::SparseOps::attend_rows) for queries
/// `[batch, heads, tokens, width]`.
pub(crate) fn launch_attend(
    client: &Client,
    bindings: AttendBindings,
    [batch, heads, tokens, width]: [usize; 4],
    top_k: usize,
    plan: &AttendPlan,
) -> Result<()> {
    if width > WIDEST {
        let what = format!("sparse attention over rows of {width} channels");
        let why = format!("kernels share memory for at most {WIDEST}");
        return Err(crate::Error::Unsupported { what, why });
    }
    let AttendPlan { window, sliding_window, entries, compression, selects, scale, .. } = *plan;
    let cubes = batch * tokens * heads.div_ceil(HEADS);
    let elements =
        window.elements().max(entries.elements()).max(batch * tokens * (heads * width).max(top_k));
    let limits = Limits::of(client.properties());
    let grid = Grid::new("sparse attention", [cubes.max(1), 1, 1], UNITS, elements, &limits)?;
    let blueprint = AttendBlueprint {
        width,
        compresses: compression.is_some(),
        selects,
        spec: entries.code_spec(),
    };
    let args = AttendArgsLaunch::new(
        batch,
        heads,
        tokens,
        top_k,
        compression.map_or(1, |compression| compression.ratio),
        sliding_window,
        scale,
        window.args(),
        entries.args(),
    );
    attend_rows::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        InputsLaunch::new(
            bindings.query,
            bindings.window,
            bindings.codes,
            bindings.floats,
            bindings.selected,
            bindings.sink_logits,
            bindings.span,
        ),
        bindings.output,
        args,
        blueprint,
        window.format.float.elem(),
        entries.format.float.elem(),
    );
    Ok(())
}
