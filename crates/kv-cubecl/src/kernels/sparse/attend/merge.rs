//! Sums over the parts of a token's rows, and how they are merged.

use cubecl::prelude::*;

use super::args::{AttendArgs, AttendBlueprint, Seen};
use crate::kernels::head_rows::{Board, HEADS, LOWEST, Sums, UNITS};

/// Writes the sums of the unit's channels over the cube's part of the rows, as
/// [`merge_parts`] reads them.
#[cube]
pub(super) fn write_sums(
    output: &mut [f32],
    first_head: usize,
    part: usize,
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
            let row = (seen.sequence * args.heads + head) * args.tokens + seen.token;
            let at = (row * args.parts + part) * (width + 2);
            #[unroll]
            for i in 0..own {
                let channel = board.unit + i * UNITS;
                if channel < width {
                    output[at + channel] = sums.rows[h * own + i];
                }
            }
            if board.unit == 0 {
                output[at + width] = sums.most[h];
                output[at + width + 1] = sums.weights[h];
            }
        }
    }
}

/// Run-time numbers of a launch.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct MergeArgs {
    batch: usize,
    heads: usize,
    tokens: usize,
    parts: usize,
    width: usize,
}

/// One cube per head of a token. Each part has the weighted sums of all channels, its largest
/// score, and the sum of its weights, `[batch, heads, tokens, parts, width + 2]`.
#[cube(launch, address_type = "dynamic")]
pub(crate) fn merge_parts(sums: &[f32], sink_logits: &[f32], output: &mut [f32], args: MergeArgs) {
    let row = CUBE_POS;
    if row >= args.batch * args.heads * args.tokens {
        terminate!();
    }
    let (width, stride) = (args.width, args.width + 2);
    let first = row * args.parts * stride;
    let sink = sink_logits[row / args.tokens % args.heads];
    let mut most = sink;
    for part in 0..args.parts {
        most = clamp_min(most, sums[first + part * stride + width]);
    }
    let mut weights = f32::new(0.0);
    // No sink is the lowest number.
    if sink > f32::new(LOWEST) {
        weights = (sink - most).exp();
    }
    for part in 0..args.parts {
        let at = first + part * stride + width;
        weights += (sums[at] - most).exp() * sums[at + 1];
    }
    let mut channel = UNIT_POS as usize;
    while channel < width {
        let mut x = f32::new(0.0);
        for part in 0..args.parts {
            let at = first + part * stride;
            x += (sums[at + width] - most).exp() * sums[at + channel];
        }
        // A token that is not part of the call has no weights.
        if weights != f32::new(0.0) {
            x /= weights;
        }
        output[row * width + channel] = x;
        channel += UNITS;
    }
}
