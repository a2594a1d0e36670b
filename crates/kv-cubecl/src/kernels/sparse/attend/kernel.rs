//! Attends to the rows of a token.
//!
//! Loops over channels are unrolled, so that the one over tiles is left: Mesa's CPU device
//! (llvmpipe) ends all loops of an invocation after 65,535 iterations in total, and computes with
//! what it has by then.

use cubecl::prelude::*;

use super::{
    super::rows::{added, channel_at},
    args::{AttendArgs, AttendBlueprint, Inputs, Seen},
    merge::write_sums,
};
use crate::kernels::head_rows::{
    Board, HEADS, LOWEST, PAIRS, Sums, TILE, UNITS, add_rows, multiply, new_board, no_sums, product,
};

/// One cube per token, group of heads, and part of the rows.
#[cube(launch, address_type = "dynamic")]
pub(crate) fn attend_rows<W: Float, R: Float>(
    inputs: Inputs<W, R>,
    output: &mut [f32],
    args: AttendArgs,
    #[comptime] bp: AttendBlueprint,
    #[define(W)] _window_type: ElemType,
    #[define(R)] _entry_type: ElemType,
) {
    let groups = args.heads.div_ceil(HEADS);
    let (cube, part) = (CUBE_POS / args.parts, CUBE_POS % args.parts);
    if cube >= args.batch * args.tokens * groups {
        terminate!();
    }
    let (row, first_head) = (cube / groups, cube % groups * HEADS);
    let seen = rows_of(&inputs.span, row, part, &args, bp);
    let mut board = new_board();
    let own = comptime!(bp.own_channels());
    let mut queries = Array::<f32>::new(comptime!(HEADS * bp.own_channels()));
    #[unroll]
    for h in 0..HEADS {
        // Heads past the last repeat it; they are not written.
        let head = clamp_max(first_head + h, args.heads - 1);
        let at = ((seen.sequence * args.heads + head) * args.tokens + seen.token) * bp.width;
        #[unroll]
        for i in 0..own {
            let channel = board.unit + i * UNITS;
            queries[h * own + i] = f32::new(0.0);
            if channel < bp.width {
                queries[h * own + i] = inputs.query[at + channel];
            }
        }
    }
    let mut sums = no_sums(own);
    let mut rows = Array::<f32>::new(comptime!(TILE * bp.own_channels()));
    let mut first = seen.begin;
    while first < seen.end {
        load_rows::<W, R>(&inputs, first, &seen, &board, &mut rows, &args, bp);
        score_rows(&inputs.selected, first, &seen, &queries, &rows, &mut board, &args, bp);
        add_rows(&rows, &board, &mut sums, 1.0, own);
        first += TILE;
    }
    if comptime!(bp.partial) {
        write_sums(output, first_head, part, &seen, &board, &sums, &args, bp);
    } else {
        write_heads(output, &inputs.sink_logits, first_head, &seen, &board, &sums, &args, bp);
    }
}

/// Returns the rows that a token sees, and the part of them that a cube has. `row` counts the
/// tokens of all sequences.
#[cube]
fn rows_of(
    span: &[i32],
    row: usize,
    part: usize,
    args: &AttendArgs,
    #[comptime] bp: AttendBlueprint,
) -> Seen {
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
    let share = n.div_ceil(args.parts);
    let begin = clamp_max(part * share, n);
    let end = clamp_max(begin + share, n);
    Seen { sequence, token, n, begin, end, first, recent, selection: row * args.top_k }
}

/// Restores the unit's channels of the rows from the `first` of a token on; 0 for what does not
/// exist.
#[cube]
fn load_rows<W: Float, R: Float>(
    inputs: &Inputs<W, R>,
    first: usize,
    seen: &Seen,
    board: &Board,
    rows: &mut Array<f32>,
    args: &AttendArgs,
    #[comptime] bp: AttendBlueprint,
) {
    let (width, own) = comptime!((bp.width, bp.own_channels()));
    let selected = &inputs.selected;
    #[unroll]
    for t in 0..TILE {
        let nth = first + t;
        let exists = row_exists(selected, nth, seen, bp);
        let recent = nth < seen.recent;
        let mut slot = 0usize;
        if exists {
            if recent {
                slot = (seen.first + nth) % args.window.slots;
            } else {
                slot = nth - seen.recent;
                if comptime!(bp.selects) {
                    slot = selected[seen.selection + slot] as usize;
                }
            }
        }
        #[unroll]
        for i in 0..own {
            let channel = board.unit + i * UNITS;
            let mut x = f32::new(0.0);
            if exists && channel < width {
                if recent {
                    let row = seen.sequence * args.window.slots + slot;
                    x = f32::cast_from(inputs.window[row * width + channel]);
                } else {
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
            rows[t * own + i] = x;
        }
    }
}

/// Computes the scores of a tile for all heads of the cube. Ends with a barrier.
#[cube]
fn score_rows(
    selected: &[i32],
    first: usize,
    seen: &Seen,
    queries: &Array<f32>,
    rows: &Array<f32>,
    board: &mut Board,
    args: &AttendArgs,
    #[comptime] bp: AttendBlueprint,
) {
    multiply(queries, rows, board, comptime!(bp.own_channels()));
    if board.unit < PAIRS {
        let mut score = product(board) * args.scale;
        if !row_exists(selected, first + board.unit % TILE, seen, bp) {
            score = f32::new(LOWEST);
        }
        board.scores[board.unit] = score;
    }
    sync_cube();
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

/// Returns true if the `nth` row of a token exists and is in the cube's part: selections may be
/// shorter than their buffer.
#[cube]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
fn row_exists(selected: &[i32], nth: usize, seen: &Seen, #[comptime] bp: AttendBlueprint) -> bool {
    let mut exists = nth < seen.end;
    if comptime!(bp.selects) {
        if exists && nth >= seen.recent {
            exists = selected[seen.selection + nth - seen.recent] >= 0i32;
        }
    }
    exists
}
