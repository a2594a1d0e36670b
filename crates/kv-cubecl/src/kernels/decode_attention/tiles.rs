//! The tiles of tokens that a split attends to.

use cubecl::prelude::*;

use super::{args::DecodeArgs, base::DecodeBlueprint};
use crate::kernels::layout::{begin, quantized};

/// The score of a masked token, below every other except -inf; WGSL has no literal for infinity.
pub(crate) const LOWEST: f32 = f32::MIN;

/// The weight of a score: 0 if it is masked, NaN if it is NaN.
#[cube]
pub(crate) fn weight_of(score: f32, largest: f32) -> f32 {
    // A NaN score must get weight NaN, so the test is not `score > LOWEST`.
    select(score == f32::new(LOWEST), f32::new(0.0), (score - largest).exp())
}

/// Tokens in a slice of the cache, and those of them to attend to.
#[derive(CubeType)]
pub(crate) struct Lengths {
    pub(crate) len: usize,
    pub(crate) tokens: usize,
}

/// Returns the lengths of a slice: 0 for a sequence that takes no part.
#[cube]
pub(crate) fn lengths_of(slice: usize, args: &DecodeArgs) -> Lengths {
    let mut len = args.len;
    let mut tokens = args.tokens;
    #[comptime]
    match &args.positions.newest {
        ComptimeOption::Some(position) => {
            let position = position[slice / args.positions.slices];
            len = 0;
            // A full cache stays as it is; a sequence that takes no part has no tokens.
            if position >= 0 {
                len = clamp_max(position as usize, args.cache.capacity - 1) + 1;
            }
            tokens = len;
        }
        ComptimeOption::None => {}
    }
    Lengths { len, tokens }
}

/// The tokens that a split attends to, and how they are stored.
#[derive(CubeType)]
pub(super) struct Extent {
    pub(super) tokens: usize,
    /// The first token past the sinks that is seen.
    pub(super) begin: usize,
    /// The first packed key that is read, from which on groups are whole.
    pub(super) first_packed: usize,
    /// One past the last packed key, and the first key past the sinks that is seen in float.
    pub(super) end_packed: usize,
    pub(super) first_float: usize,
    /// Tokens after the sinks whose values are packed.
    pub(super) packed_values: usize,
    /// First tile of the split, and one past its last.
    pub(super) first_tile: usize,
    pub(super) last_tile: usize,
}

/// The share of `split`: a run of tiles; the last splits may get none.
#[cube]
pub(super) fn extent_of(
    slice: usize,
    split: usize,
    args: &DecodeArgs,
    #[comptime] bp: DecodeBlueprint,
) -> Extent {
    let tile = comptime!(bp.tile());
    let Lengths { len, tokens } = lengths_of(slice, args);
    let schedule = &args.cache.schedule;
    let sinks = clamp_max(schedule.sinks, tokens);
    let packed_values = quantized(len, &schedule.values, schedule);
    let packed_keys = clamp_max(quantized(len, &schedule.keys, schedule), tokens - sinks);
    let end_packed = sinks + packed_keys;
    let mut seen = sinks;
    let mut first_packed = sinks;
    let mut first_float = end_packed;
    if comptime!(bp.window) {
        seen = clamp_max(begin(tokens, schedule), tokens);
        if seen > end_packed {
            first_packed = end_packed;
            first_float = seen;
        } else if seen > sinks {
            let block_tokens = comptime!(bp.key_block_tokens());
            first_packed = sinks + (seen - sinks) / block_tokens * block_tokens;
        }
    }
    let n_tiles = sinks.div_ceil(tile)
        + (end_packed - first_packed).div_ceil(tile)
        + (tokens - first_float).div_ceil(tile);
    let share = n_tiles.div_ceil(args.n_splits);
    let first_tile = split * share;
    let last_tile = clamp_max(first_tile + share, n_tiles);
    Extent {
        tokens,
        begin: seen,
        first_packed,
        end_packed,
        first_float,
        packed_values,
        first_tile,
        last_tile,
    }
}

/// Consecutive tokens that are handled together, their keys all in one form.
#[derive(CubeType)]
pub(super) struct Tile {
    /// First token.
    pub(super) start: usize,
    /// One past the last.
    pub(super) end: usize,
    /// The first that is seen.
    pub(super) begin: usize,
    /// True if the tokens come after the sinks.
    pub(super) windowed: bool,
    /// True if their keys are packed.
    pub(super) packed: bool,
}

/// Tile `index`: those of sinks come first, then those of packed keys, then the keys in float.
#[cube]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
pub(super) fn tile_at(
    index: usize,
    extent: &Extent,
    args: &DecodeArgs,
    #[comptime] bp: DecodeBlueprint,
) -> Tile {
    let tile = comptime!(bp.tile());
    let sinks = clamp_max(args.cache.schedule.sinks, extent.tokens);
    let sink_tiles = sinks.div_ceil(tile);
    let packed_tiles = (extent.end_packed - extent.first_packed).div_ceil(tile);
    let windowed = index >= sink_tiles;
    let packed = windowed && index < sink_tiles + packed_tiles;
    let mut start = index * tile;
    let mut limit = sinks;
    if packed {
        start = extent.first_packed + (index - sink_tiles) * tile;
        limit = extent.end_packed;
    } else if windowed {
        start = extent.first_float + (index - sink_tiles - packed_tiles) * tile;
        limit = extent.tokens;
    }
    let end = clamp_max(start + tile, limit);
    let mut begin = start;
    if comptime!(bp.window) {
        if windowed {
            begin = clamp_min(start, extent.begin);
        }
    }
    Tile { start, end, begin, windowed, packed }
}
