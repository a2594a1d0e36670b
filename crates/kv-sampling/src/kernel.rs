//! Sampling on a GPU by one cube, whose units share the vocabulary.
//!
//! Nothing is sorted. A filter is the least logit that it keeps. It is found bit by bit: sums over
//! the vocabulary tell whether enough tokens, or enough of the probability, are at or above a
//! candidate. The draw is the largest of the remaining logits with Gumbel noise (Gumbel, 1954;
//! Maddison et al., 2014, <https://arxiv.org/abs/1411.0030>), which needs no sum.

use cubecl::{client::Client, prelude::*};

use crate::Draw;

/// Units of the cube; WebGPU guarantees this number.
const UNITS: usize = 256;

/// Number of halvings until one unit is left.
const HALVINGS: usize = UNITS.ilog2() as usize;

pub(crate) struct Bindings {
    /// f32 `[texts, vocab]`.
    pub(crate) logits: BufferArg,
    /// i32, and their number, at least 1.
    pub(crate) ends: (BufferArg, usize),
    /// i32 `[texts]`.
    pub(crate) ids: BufferArg,
    /// i32 `[1]`.
    pub(crate) position: BufferArg,
    /// i32 `[1]`.
    pub(crate) broken: BufferArg,
}

/// Settings that change the generated code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Blueprint {
    draws: bool,
    top_k: bool,
    top_p: bool,
}

/// Run-time numbers of a launch.
#[derive(CubeType, CubeLaunch)]
struct Args {
    texts: usize,
    vocab: usize,
    n_ends: usize,
    past: i32,
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    seed_low: u32,
    seed_high: u32,
}

/// Computes [`SamplingOps::advance`](crate::SamplingOps::advance) in one launch.
pub(crate) fn launch(
    client: &Client,
    bindings: Bindings,
    [texts, vocab]: [usize; 2],
    past: usize,
    draw: &Draw,
) {
    let Bindings { logits, ends: (ends, n_ends), ids, position, broken } = bindings;
    let draws = !draw.is_greedy();
    let blueprint = Blueprint {
        draws,
        top_k: draws && draw.top_k > 0 && draw.top_k < vocab,
        top_p: draws && draw.top_p < 1.0,
    };
    let args = ArgsLaunch::new(
        texts,
        vocab,
        n_ends,
        past as i32,
        draw.temperature,
        draw.top_k as u32,
        draw.top_p,
        draw.min_p,
        draw.seed as u32,
        (draw.seed >> 32) as u32,
    );
    advance::launch(
        client,
        CubeCount::Static(1, 1, 1),
        CubeDim::new_1d(UNITS as u32),
        logits,
        ends,
        ids,
        position,
        broken,
        args,
        blueprint,
    );
}

#[derive(CubeType)]
struct Board {
    floats: Shared<[f32]>,
    ints: Shared<[u32]>,
    unit: usize,
}

/// Returns the sum of the values of all units. Contains barriers.
#[cube]
fn sum(value: f32, board: &mut Board) -> f32 {
    sync_cube();
    board.floats[board.unit] = value;
    sync_cube();
    #[unroll]
    for step in 0..HALVINGS {
        let width = comptime!(UNITS >> (step + 1));
        if board.unit < width {
            let other = board.floats[board.unit + width];
            board.floats[board.unit] += other;
        }
        sync_cube();
    }
    board.floats[0]
}

/// Returns the sum of the counts of all units. Contains barriers.
#[cube]
fn count(value: u32, board: &mut Board) -> u32 {
    sync_cube();
    board.ints[board.unit] = value;
    sync_cube();
    #[unroll]
    for step in 0..HALVINGS {
        let width = comptime!(UNITS >> (step + 1));
        if board.unit < width {
            let other = board.ints[board.unit + width];
            board.ints[board.unit] += other;
        }
        sync_cube();
    }
    board.ints[0]
}

/// Leaves the largest of the units' scores in `floats[0]` and its id in `ints[0]`, of equals the
/// smallest id.
#[cube]
fn best(score: f32, id: u32, board: &mut Board) {
    sync_cube();
    board.floats[board.unit] = score;
    board.ints[board.unit] = id;
    sync_cube();
    #[unroll]
    for step in 0..HALVINGS {
        let width = comptime!(UNITS >> (step + 1));
        if board.unit < width {
            let (score, id) = (board.floats[board.unit], board.ints[board.unit]);
            let (other, other_id) =
                (board.floats[board.unit + width], board.ints[board.unit + width]);
            if other > score || (other == score && other_id < id) {
                board.floats[board.unit] = other;
                board.ints[board.unit] = other_id;
            }
        }
        sync_cube();
    }
}

/// Returns a number that is larger for a larger `x`.
#[cube]
fn rank(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let mut rank = bits | 0x8000_0000u32;
    if bits >= 0x8000_0000u32 {
        rank = !bits;
    }
    rank
}

#[cube]
fn mix(x: u32) -> u32 {
    let x = (x ^ (x >> 16u32)) * 0x7feb_352du32;
    let x = (x ^ (x >> 15u32)) * 0x846c_a68bu32;
    x ^ (x >> 16u32)
}

#[cube(launch)]
#[allow(clippy::needless_range_loop, reason = "kernels have no iterators")]
fn advance(
    logits: &[f32],
    ends: &[i32],
    ids: &mut [i32],
    position: &mut [i32],
    broken: &mut [i32],
    args: Args,
    #[comptime] bp: Blueprint,
) {
    let mut board = Board {
        floats: Shared::<[f32]>::new_slice(UNITS),
        ints: Shared::<[u32]>::new_slice(UNITS),
        unit: UNIT_POS as usize,
    };
    let at = position[0];
    let mut failed = 0i32;
    let mut next = at + 1;
    for text in 0..args.texts {
        let row = text * args.vocab;
        let odd = most_likely(logits, row, &mut board, &args);
        if comptime!(bp.draws) {
            let most = board.floats[0];
            draw(logits, row, text as u32, at as u32, most, &mut board, &args, bp);
        }
        if board.unit == 0 {
            let mut picked = board.ints[0] as i32;
            if odd > 0 {
                picked = 0;
                failed += 1;
            }
            ids[text] = picked;
            for end in 0..args.n_ends {
                if ends[end] == picked {
                    next = at + 1 + args.past;
                }
            }
        }
        sync_cube();
    }
    if board.unit == 0 {
        position[0] = next;
        broken[0] += failed;
    }
}

/// Leaves the largest logit of a row in `floats[0]` and its id in `ints[0]`. Returns the number of
/// logits that are not finite.
#[cube]
fn most_likely(logits: &[f32], row: usize, board: &mut Board, args: &Args) -> u32 {
    let mut largest = f32::new(f32::MIN);
    // An id that loses against every other.
    let mut id = 0xffff_ffffu32;
    let mut odd = 0u32;
    let mut i = board.unit;
    while i < args.vocab {
        let logit = logits[row + i];
        // All bits of the exponent: infinite or NaN.
        if u32::reinterpret(logit) & 0x7f80_0000u32 == 0x7f80_0000u32 {
            odd += 1;
        }
        if logit > largest || id == 0xffff_ffffu32 {
            largest = logit;
            id = i as u32;
        }
        i += UNITS;
    }
    let odd = count(odd, board);
    best(largest, id, board);
    odd
}

/// Leaves the id that is drawn from a row, whose largest logit is `most`, in `ints[0]`.
#[cube]
fn draw(
    logits: &[f32],
    row: usize,
    text: u32,
    at: u32,
    most: f32,
    board: &mut Board,
    args: &Args,
    #[comptime] bp: Blueprint,
) {
    let mut least = 0u32;
    if comptime!(bp.top_k) {
        least = top_k_rank(logits, row, board, args);
    }
    if comptime!(bp.top_p) {
        let enough = args.top_p * mass(logits, row, most, least, board, args);
        let mut nucleus = 0u32;
        for step in 0..32u32 {
            let candidate = nucleus | (0x8000_0000u32 >> step);
            let mut lowest = candidate;
            if least > candidate {
                lowest = least;
            }
            if mass(logits, row, most, lowest, board, args) >= enough {
                nucleus = candidate;
            }
        }
        if nucleus > least {
            least = nucleus;
        }
    }
    let first = mix(mix(mix(args.seed_low) ^ at) + text);
    let second = mix(mix(mix(args.seed_high ^ 0x9e37_79b9u32) ^ text) + at);
    let mut largest = f32::new(f32::MIN);
    let mut id = 0xffff_ffffu32;
    let mut i = board.unit;
    while i < args.vocab {
        let logit = logits[row + i];
        let weight = ((logit - most) / args.temperature).exp();
        if rank(logit) >= least && weight >= args.min_p {
            let bits = mix(mix(i as u32 ^ first) + second) >> 9u32;
            let uniform = (bits as f32 + 0.5) / 8_388_608.0;
            let score = logit / args.temperature - (-uniform.ln()).ln();
            if score > largest || id == 0xffff_ffffu32 {
                largest = score;
                id = i as u32;
            }
        }
        i += UNITS;
    }
    best(largest, id, board);
}

/// Returns the largest rank that at least `top_k` logits of a row reach.
#[cube]
fn top_k_rank(logits: &[f32], row: usize, board: &mut Board, args: &Args) -> u32 {
    let mut least = 0u32;
    for step in 0..32u32 {
        let candidate = least | (0x8000_0000u32 >> step);
        let mut kept = 0u32;
        let mut i = board.unit;
        while i < args.vocab {
            if rank(logits[row + i]) >= candidate {
                kept += 1;
            }
            i += UNITS;
        }
        if count(kept, board) >= args.top_k {
            least = candidate;
        }
    }
    least
}

/// Returns the sum of weights of logits whose rank is at least `least`.
#[cube]
fn mass(logits: &[f32], row: usize, most: f32, least: u32, board: &mut Board, args: &Args) -> f32 {
    let mut total = f32::new(0.0);
    let mut i = board.unit;
    while i < args.vocab {
        let logit = logits[row + i];
        if rank(logit) >= least {
            total += ((logit - most) / args.temperature).exp();
        }
        i += UNITS;
    }
    sum(total, board)
}
