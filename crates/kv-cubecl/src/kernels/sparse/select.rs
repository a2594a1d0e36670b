//! The highest scores of each token, by one cube whose units share them.
//!
//! Nothing is sorted. The least score that is kept is found bit by bit, by counting how many scores
//! are at or above a candidate. Units then write what they keep of their run of entries, in order,
//! after what the units before them keep.

use cubecl::{client::Client, prelude::*};

use super::rows::added;
use crate::{
    Result,
    formats::cube::is_nan,
    kernels::{Grid, Limits},
    sparse::Compression,
};

/// Units of a cube; WebGPU guarantees this number.
pub(super) const UNITS: usize = 256;
/// Number of halvings until one unit is left.
const HALVINGS: usize = UNITS.ilog2() as usize;

/// Sizes of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SelectProblem {
    /// Sequences.
    pub(crate) batch: usize,
    /// Tokens of the call.
    pub(crate) tokens: usize,
    /// Entries with scores.
    pub(crate) n: usize,
    /// Entries that are kept.
    pub(crate) top_k: usize,
    /// The tokens of an entry.
    pub(crate) compression: Compression,
}

/// Run-time numbers of a launch.
#[derive(CubeType, CubeLaunch)]
pub(super) struct SelectArgs {
    batch: usize,
    tokens: usize,
    n: usize,
    top_k: usize,
    ratio: usize,
}

/// Returns a number that orders as the score does, 0 and -0 alike, and NaN below every score.
#[cube]
fn ordered(score: f32) -> u32 {
    let bits = u32::reinterpret(score + f32::new(0.0));
    // Negative numbers order the other way.
    let ordered = select(bits >> 31u32 == 0u32, bits | (1u32 << 31u32), !bits);
    select(is_nan(score), 0u32, ordered)
}

/// Returns the sum of the numbers of all units. Contains barriers.
#[cube]
fn sum(number: u32, shared: &mut Shared<[u32]>) -> u32 {
    let unit = UNIT_POS as usize;
    sync_cube();
    shared[unit] = number;
    sync_cube();
    #[unroll]
    for step in 0..HALVINGS {
        let width = comptime!(UNITS >> (step + 1));
        if unit < width {
            let other = shared[unit + width];
            shared[unit] += other;
        }
        sync_cube();
    }
    shared[0]
}

/// Returns the sum of the numbers of the units before this one. Contains barriers.
#[cube]
fn sum_before(number: u32, shared: &mut Shared<[u32]>) -> u32 {
    let unit = UNIT_POS as usize;
    sync_cube();
    shared[unit] = number;
    sync_cube();
    let mut before = 0u32;
    for other in 0..unit {
        before += shared[other];
    }
    before
}

/// One cube per token.
#[cube(launch, address_type = "dynamic")]
pub(super) fn select_scores(scores: &[f32], span: &[i32], selected: &mut [i32], args: SelectArgs) {
    let unit = UNIT_POS as usize;
    let mut shared = Shared::<[u32]>::new_slice(UNITS);
    let row = CUBE_POS;
    if row >= args.batch * args.tokens {
        terminate!();
    }
    let (sequence, token) = (row / args.tokens, row % args.tokens);
    let call = added(span, sequence, args.batch);
    let mut seen = 0usize;
    if token < call.count {
        seen = clamp_max((call.start + token + 1) / args.ratio, args.n);
    }
    let (base, out) = (row * args.n, row * args.top_k);
    let kept = clamp_max(seen, args.top_k);
    let share = seen.div_ceil(UNITS);
    let first = clamp_max(unit * share, seen);
    let end = clamp_max(first + share, seen);
    // The largest number that at least `kept` scores reach.
    let mut least = 0u32;
    if kept < seen {
        for step in 0..32u32 {
            let candidate = least | (1u32 << (31u32 - step));
            let mut count = 0u32;
            for i in first..end {
                if ordered(scores[base + i]) >= candidate {
                    count += 1u32;
                }
            }
            if sum(count, &mut shared) >= kept as u32 {
                least = candidate;
            }
        }
    }
    let mut above = 0u32;
    let mut equal = 0u32;
    for i in first..end {
        let score = ordered(scores[base + i]);
        if score > least {
            above += 1u32;
        } else if score == least {
            equal += 1u32;
        }
    }
    // Of equal scores, the first are kept.
    let room = kept as u32 - sum(above, &mut shared);
    let before = sum_before(equal, &mut shared);
    let mut own = room - clamp_max(before, room);
    own = clamp_max(own, equal);
    let mut to = out + sum_before(above + own, &mut shared) as usize;
    for i in first..end {
        let score = ordered(scores[base + i]);
        let mut keeps = score > least;
        if score == least && own > 0u32 {
            own -= 1u32;
            keeps = true;
        }
        if keeps {
            selected[to] = i as i32;
            to += 1;
        }
    }
    let mut i = kept + unit;
    while i < args.top_k {
        selected[out + i] = -1i32;
        i += UNITS;
    }
}

/// Computes [`SparseOps::top_entries`](crate::sparse::SparseOps::top_entries).
pub(crate) fn launch_select(
    client: &Client,
    [scores, span, selected]: [BufferArg; 3],
    problem: &SelectProblem,
) -> Result<()> {
    let SelectProblem { batch, tokens, n, top_k, compression } = *problem;
    let rows = batch * tokens;
    let limits = Limits::of(client.properties());
    let elements = rows * n.max(top_k);
    let grid = Grid::new("top_entries", [rows.max(1), 1, 1], UNITS, elements, &limits)?;
    select_scores::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        scores,
        span,
        selected,
        SelectArgsLaunch::new(batch, tokens, n, top_k, compression.ratio),
    );
    Ok(())
}
