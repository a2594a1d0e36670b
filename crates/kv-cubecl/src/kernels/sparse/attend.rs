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
    /// The first recent token.
    first: usize,
    /// Recent tokens.
    recent: usize,
    /// The first of the token's selected entries.
    selection: usize,
}

/// One cube per token and group of heads.
#[cube(launch, address_type = "dynamic")]
fn attend_rows<W: Float, R: Float>(
    query: &[f32],
    window: &[W],
    codes: &[u32],
    floats: &[R],
    selected: &[i32],
    sink_logits: &[f32],
    span: &[i32],
    output: &mut [f32],
    args: AttendArgs,
    #[comptime] bp: AttendBlueprint,
    #[define(W)] _window_type: ElemType,
    #[define(R)] _entry_type: ElemType,
) {
    let width = comptime!(bp.width);
    let own = comptime!(bp.width.div_ceil(UNITS));
    let unit = UNIT_POS as usize;
    let groups = args.heads.div_ceil(HEADS);
    let cube = CUBE_POS;
    if cube >= args.batch * args.tokens * groups {
        terminate!();
    }
    let (row, first_head) = (cube / groups, cube % groups * HEADS);
    let (sequence, token) = (row / args.tokens, row % args.tokens);
    let call = added(span, sequence, args.batch);
    let mut n = 0usize;
    let mut seen = Seen { first: 0, recent: 0, selection: row * args.top_k };
    if token < call.count {
        let position = call.start + token;
        seen.recent = clamp_max(position + 1, args.sliding_window);
        seen.first = position + 1 - seen.recent;
        n = seen.recent;
        if comptime!(bp.selects) {
            n += args.top_k;
        } else if comptime!(bp.compresses) {
            n += (position + 1) / args.ratio;
        }
    }

    let mut tile = Shared::<[f32]>::new_slice(comptime!(TILE * bp.width));
    let mut exists = Shared::<[u32]>::new_slice(TILE);
    let mut partial = Shared::<[f32]>::new_slice(UNITS);
    let mut scores = Shared::<[f32]>::new_slice(comptime!(TILE * HEADS));
    let mut sums = Array::<f32>::new(comptime!(HEADS * bp.width.div_ceil(UNITS)));
    let mut most = Array::<f32>::new(HEADS);
    let mut weights = Array::<f32>::new(HEADS);
    #[unroll]
    for h in 0..HEADS {
        most[h] = f32::new(LOWEST);
        weights[h] = f32::new(0.0);
        #[unroll]
        for i in 0..own {
            sums[h * own + i] = f32::new(0.0);
        }
    }
    let pair = unit / LANES;
    let (dot_head, dot_row, lane) = (pair / TILE, pair % TILE, unit % LANES);
    let head = clamp_max(first_head + dot_head, args.heads - 1);
    let query_row = ((sequence * args.heads + head) * args.tokens + token) * width;
    let mut first = 0usize;
    while first < n {
        if unit < TILE {
            exists[unit] = row_exists(selected, first + unit, n, &seen, bp);
        }
        let mut i = unit;
        while i < comptime!(TILE * bp.width) {
            let (nth, channel) = (first + i / width, i % width);
            let mut x = f32::new(0.0);
            if row_exists(selected, nth, n, &seen, bp) == 1u32 {
                if nth < seen.recent {
                    let slot = (seen.first + nth) % args.window.slots;
                    x = f32::cast_from(
                        window[(sequence * args.window.slots + slot) * width + channel],
                    );
                } else {
                    let mut slot = nth - seen.recent;
                    if comptime!(bp.selects) {
                        slot = selected[seen.selection + slot] as usize;
                    }
                    x = channel_at::<R>(
                        codes,
                        floats,
                        sequence,
                        slot,
                        channel,
                        &args.entries,
                        bp.spec,
                    );
                }
            }
            tile[i] = x;
            i += UNITS;
        }
        sync_cube();
        let mut dot = f32::new(0.0);
        let mut channel = lane;
        while channel < width {
            dot += query[query_row + channel] * tile[dot_row * width + channel];
            channel += LANES;
        }
        partial[unit] = dot;
        sync_cube();
        if unit < comptime!(TILE * HEADS) {
            let mut score = f32::new(0.0);
            #[unroll]
            for i in 0..LANES {
                score += partial[unit * LANES + i];
            }
            score *= args.scale;
            if exists[unit % TILE] == 0u32 {
                score = f32::new(LOWEST);
            }
            scores[unit] = score;
        }
        sync_cube();
        #[unroll]
        for h in 0..HEADS {
            let mut largest = most[h];
            #[unroll]
            for t in 0..TILE {
                largest = clamp_min(largest, scores[h * TILE + t]);
            }
            let factor = (most[h] - largest).exp();
            most[h] = largest;
            weights[h] *= factor;
            #[unroll]
            for i in 0..own {
                sums[h * own + i] *= factor;
            }
            #[unroll]
            for t in 0..TILE {
                let score = scores[h * TILE + t];
                if score > f32::new(LOWEST) {
                    let weight = (score - largest).exp();
                    weights[h] += weight;
                    #[unroll]
                    for i in 0..own {
                        let channel = unit + i * UNITS;
                        if channel < width {
                            sums[h * own + i] += weight * tile[t * width + channel];
                        }
                    }
                }
            }
        }
        sync_cube();
        first += TILE;
    }
    #[unroll]
    for h in 0..HEADS {
        let head = first_head + h;
        if head < args.heads {
            let sink = sink_logits[head];
            let base = clamp_min(most[h], sink);
            let factor = (most[h] - base).exp();
            let mut sum = weights[h] * factor;
            // No sink is the lowest number.
            if sink > f32::new(LOWEST) {
                sum += (sink - base).exp();
            }
            let at = ((sequence * args.heads + head) * args.tokens + token) * width;
            #[unroll]
            for i in 0..own {
                let channel = unit + i * UNITS;
                if channel < width {
                    let mut x = f32::new(0.0);
                    if n > 0 {
                        x = sums[h * own + i] * factor / sum;
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
fn row_exists(
    selected: &[i32],
    nth: usize,
    n: usize,
    seen: &Seen,
    #[comptime] bp: AttendBlueprint,
) -> u32 {
    let mut exists = 0u32;
    if nth < n {
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
        bindings.query,
        bindings.window,
        bindings.codes,
        bindings.floats,
        bindings.selected,
        bindings.sink_logits,
        bindings.span,
        bindings.output,
        args,
        blueprint,
        window.format.float.elem(),
        entries.format.float.elem(),
    );
    Ok(())
}
