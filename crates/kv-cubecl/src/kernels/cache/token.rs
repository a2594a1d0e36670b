//! Appends one token in one launch, both sides, with all that leaves the residual for it.

use cubecl::prelude::*;

use super::{
    elements::{Chunk, Element, FlushBlueprint, Lengths, store},
    flush::{flush_group, flush_tokens},
};
use crate::{
    formats::QuantSpec,
    kernels::layout::{CacheArgs, Positions, SideArgs, SideScheduleArgs, quantized},
    layout::Sides,
};

/// Compile-time parameters of writing a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SideBlueprint {
    /// Quantization, if any.
    pub(super) spec: Option<QuantSpec>,
    /// True if float rows are narrower than f32.
    pub(super) saturating: bool,
}

/// Returns the number of units per token of a side. Each stores the channels of the groups that it
/// quantizes; where a token's parameters share words there is one unit.
pub(super) const fn runs(spec: &Option<QuantSpec>, head_dim: usize) -> usize {
    match spec {
        Some(spec) if spec.packs_parameters() => 1,
        Some(spec) => spec.groups(head_dim),
        None => head_dim,
    }
}

/// Division of the work on a side over units.
#[derive(CubeType, CubeLaunch)]
pub(super) struct SideUnits {
    /// Largest number of blocks of tokens that leave the residual; at least 1.
    pub(super) blocks: usize,
    /// Units that share the channels of a token: [`runs`].
    pub(super) runs: usize,
}

/// Run-time numbers of [`write_token`].
#[derive(CubeType, CubeLaunch)]
pub(super) struct TokenArgs {
    pub(super) lengths: Lengths,
    pub(super) positions: Positions,
    pub(super) cache: CacheArgs,
    pub(super) keys: SideUnits,
    pub(super) values: SideUnits,
    /// Units of keys, and of both sides.
    pub(super) n_keys: usize,
    pub(super) n: usize,
}

/// A unit's share of the work on a side.
#[derive(CubeType)]
struct Unit {
    slice: usize,
    /// Index of the block among those that may leave, and of the run of channels.
    block: usize,
    group: usize,
    /// Channels of a run.
    channels: usize,
}

/// Writes one side of a token that is appended, and quantizes what leaves the residual for it:
/// `unit` counts (slice, block of tokens that may leave, run of channels).
///
/// A slot that is read for what leaves and written for what comes belongs to one unit: it can only
/// be in the first block that leaves.
#[cube]
fn write_side<R: Float, C: Float>(
    floats: &mut [R],
    words: &mut [u32],
    chunk: &Chunk<C>,
    unit: usize,
    units: &SideUnits,
    args: &TokenArgs,
    side: &SideArgs,
    schedule: &SideScheduleArgs,
    #[comptime] bp: SideBlueprint,
) {
    let row = unit / units.runs;
    let slice = row / units.blocks;
    let capacity = args.cache.capacity;
    let mut len = args.lengths.len;
    #[comptime]
    match &args.positions.newest {
        ComptimeOption::Some(newest) => {
            let newest = newest[slice / args.positions.slices];
            len = capacity;
            if newest >= 0 {
                len = newest as usize;
            }
        }
        ComptimeOption::None => {}
    }
    if len < capacity {
        let (added, float_elements) = (args.lengths.added, args.lengths.float_elements);
        let lengths = Lengths { len, added, float_elements };
        let unit = Unit {
            slice,
            block: row % units.blocks,
            group: unit % units.runs,
            channels: side.head_dim / units.runs,
        };
        write_unit::<R, C>(floats, words, chunk, &unit, &lengths, &args.cache, side, schedule, bp);
    }
}

/// Does a unit's share of [`write_side`], in a cache that is not full.
#[cube]
#[allow(clippy::single_match, reason = "decided when the kernel is compiled")]
fn write_unit<R: Float, C: Float>(
    floats: &mut [R],
    words: &mut [u32],
    chunk: &Chunk<C>,
    unit: &Unit,
    lengths: &Lengths,
    cache: &CacheArgs,
    side: &SideArgs,
    schedule: &SideScheduleArgs,
    #[comptime] bp: SideBlueprint,
) {
    let slice = unit.slice;
    let before = quantized(lengths.len, schedule, &cache.schedule);
    let after = quantized(lengths.len + 1, schedule, &cache.schedule);
    let spec = comptime!(bp.spec);
    #[comptime]
    match spec {
        Some(spec) => {
            let block_tokens = comptime!(spec.block_tokens());
            let flush = comptime!(FlushBlueprint { spec, saturating: bp.saturating });
            if comptime!(spec.packs_parameters()) {
                flush_tokens::<R, C>(
                    &*floats, words, chunk, slice, before, after, lengths, side, flush,
                );
            } else if unit.block < (after - before) / block_tokens {
                let block = before / block_tokens + unit.block;
                flush_group::<R, C>(
                    &*floats, words, chunk, slice, block, unit.group, lengths, side, flush,
                );
            }
        }
        None => {}
    }
    if unit.block == 0 {
        let first_kept = cache.schedule.sinks + after;
        for i in 0..unit.channels {
            let channel = unit.group * unit.channels + i;
            let element = Element { slice, token: lengths.len, channel };
            store::<R, C>(floats, chunk, &element, first_kept, lengths, side, bp.saturating);
        }
    }
}

/// Appends one token, both sides, with all that leaves the residual for it: first the units of the
/// keys, then those of the values.
///
/// A sequence holds as many tokens as its position says, or as the lengths where there is none; if
/// it is full, or its position is below 0, nothing is written.
#[cube(launch, address_type = "dynamic")]
pub(super) fn write_token<R: Float, C: Float>(
    key: Chunk<C>,
    value: Chunk<C>,
    floats: &mut [R],
    key_words: &mut [u32],
    value_words: &mut [u32],
    args: TokenArgs,
    #[comptime] bp: Sides<SideBlueprint>,
    #[define(R)] _dtype: ElemType,
    #[define(C)] _chunk: ElemType,
) {
    let (cache, unit) = (&args.cache, ABSOLUTE_POS);
    if unit < args.n_keys {
        let (side, schedule) = (&cache.keys, &cache.schedule.keys);
        write_side::<R, C>(
            floats, key_words, &key, unit, &args.keys, &args, side, schedule, bp.keys,
        );
    } else if unit < args.n {
        let (side, schedule) = (&cache.values, &cache.schedule.values);
        let unit = unit - args.n_keys;
        write_side::<R, C>(
            floats,
            value_words,
            &value,
            unit,
            &args.values,
            &args,
            side,
            schedule,
            bp.values,
        );
    }
}
