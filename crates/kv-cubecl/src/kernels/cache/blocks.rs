//! Quantizes blocks of tokens whose groups have a range that is not just from the least number to
//! the greatest, or whose tiles are normalized first.
//!
//! The numbers of the blocks are gathered in a buffer of their own, `[blocks, tokens, head_dim]`,
//! because they are read many times. A tile is normalized there by one cube. Then one unit finds
//! the range of each group, and writes its codes, what they restore to, or a gradient.

use cubecl::prelude::*;
use kv_device::half::{half_bits, half_value};

use super::{
    elements::{BlockBlueprint, Chunk, Element, FlushBlueprint, Lengths, read},
    range::{group_range, through_range},
    tile::normalize,
};
use crate::{
    formats::{
        Granularity, QuantSpec,
        cube::{
            encode, high_shift, high_word, low_bits, low_word, offset, parameter, restore, scale,
        },
    },
    kernels::layout::{Positions, ScheduleArgs, SideArgs, packed_slot, quantized},
};

/// The blocks of a launch.
#[derive(CubeType, CubeLaunch)]
pub(super) struct BlockArgs {
    pub(super) lengths: Lengths,
    pub(super) positions: Positions,
    pub(super) schedule: ScheduleArgs,
    pub(super) capacity: usize,
    /// The first block of each slice, unless positions are read.
    pub(super) first: usize,
    /// The blocks of each slice, or the most that a token completes.
    pub(super) blocks: usize,
}

/// One of the blocks of a launch.
#[derive(CubeType)]
struct Block {
    slice: usize,
    /// The block's number in its slice.
    index: usize,
    /// Tokens in the cache before the chunk.
    len: usize,
    /// False for a block that does not leave the residual now.
    leaves: bool,
}

/// Returns the `nth` block of the launch.
#[cube]
fn block_at(nth: usize, args: &BlockArgs, #[comptime] bp: BlockBlueprint) -> Block {
    let (slice, part) = (nth / args.blocks, nth % args.blocks);
    let mut index = args.first + part;
    let mut len = args.lengths.len;
    let mut leaves = true;
    #[comptime]
    match &args.positions.newest {
        ComptimeOption::Some(newest) => {
            let newest = newest[slice / args.positions.slices];
            leaves = false;
            if newest >= 0 {
                len = newest as usize;
                let block_tokens = comptime!(bp.spec.block_tokens());
                let mut before = quantized(len, &args.schedule.keys, &args.schedule);
                let mut after = quantized(len + 1, &args.schedule.keys, &args.schedule);
                if comptime!(bp.values) {
                    before = quantized(len, &args.schedule.values, &args.schedule);
                    after = quantized(len + 1, &args.schedule.values, &args.schedule);
                }
                index = before / block_tokens + part;
                leaves = len < args.capacity && part < (after - before) / block_tokens;
            }
        }
        ComptimeOption::None => {}
    }
    Block { slice, index, len, leaves }
}

/// Copies the numbers of blocks from the ring and the chunk; one unit per number.
#[cube(launch, address_type = "dynamic")]
pub(super) fn gather_blocks<R: Float, C: Float>(
    floats: &[R],
    chunk: Chunk<C>,
    numbers: &mut [f32],
    args: BlockArgs,
    side: SideArgs,
    n: usize,
    #[comptime] bp: BlockBlueprint,
    #[define(R)] _dtype: ElemType,
    #[define(C)] _chunk_type: ElemType,
) {
    if ABSOLUTE_POS < n {
        let numbers_of_block = comptime!(bp.numbers());
        let block = block_at(ABSOLUTE_POS / numbers_of_block, &args, bp);
        if block.leaves {
            let at = ABSOLUTE_POS % numbers_of_block;
            let first = side.sinks + block.index * comptime!(bp.spec.block_tokens());
            let token = first + at / bp.head_dim;
            let element = Element { slice: block.slice, token, channel: at % bp.head_dim };
            let lengths = Lengths {
                len: block.len,
                added: args.lengths.added,
                float_elements: args.lengths.float_elements,
            };
            let flush = comptime!(FlushBlueprint { spec: bp.spec, saturating: bp.saturating });
            numbers[ABSOLUTE_POS] = read::<R, C>(floats, &chunk, &element, &lengths, &side, flush);
        }
    }
}

/// Divides tiles by their scales, and writes these to `scales` `[tiles, tokens + head_dim]`; one
/// cube per tile. The scales of channels contain the root mean square.
#[cube(launch, address_type = "dynamic")]
pub(super) fn normalize_blocks(
    numbers: &mut [f32],
    scales: &mut [f32],
    args: BlockArgs,
    n: usize,
    #[comptime] bp: BlockBlueprint,
) {
    let nth = CUBE_POS;
    if nth >= n {
        terminate!();
    }
    let block = block_at(nth, &args, bp);
    if !block.leaves {
        terminate!();
    }
    normalize(numbers, nth * comptime!(bp.numbers()), scales, nth * comptime!(bp.scales()), bp);
}

/// A group in the buffer of numbers.
#[derive(CubeType)]
struct Group {
    /// The block, and the number of the group in it.
    nth: usize,
    group: usize,
    /// The first number, and the distance to the next.
    first: usize,
    stride: usize,
}

#[cube]
fn group_at(unit: usize, #[comptime] bp: BlockBlueprint) -> Group {
    let groups = comptime!(bp.spec.groups(bp.head_dim));
    let (nth, group) = (unit / groups, unit % groups);
    let base = nth * comptime!(bp.numbers());
    if comptime!(bp.spec.granularity == Granularity::PerChannel) {
        Group { nth, group, first: base + group, stride: comptime!(bp.head_dim).runtime() }
    } else {
        Group { nth, group, first: base + group * bp.spec.group_size, stride: 1usize.runtime() }
    }
}

/// The step between the codes of a group, and the number of code 0, as codes are computed with.
#[derive(CubeType)]
struct Steps {
    step: f32,
    min: f32,
}

/// Returns the steps of a range. Without a tile they are rounded to f16, as they are stored.
#[cube]
fn steps_of(min: f32, max: f32, #[comptime] spec: QuantSpec) -> Steps {
    if comptime!(spec.tile.is_some()) {
        // The numbers of a tile are finite.
        Steps { step: (max - min) / f32::new(comptime!(spec.max_code() as f32)), min }
    } else {
        let parameter = parameter(min, max, spec);
        Steps { step: scale(parameter, spec), min: offset(parameter, spec) }
    }
}

/// Returns the scale of the token or channel that a group of a tile is, and of one of its elements,
/// which is a channel or a token.
#[cube]
fn scale_of(
    scales: &[f32],
    group: &Group,
    element: usize,
    #[comptime] bp: BlockBlueprint,
) -> (f32, f32) {
    let base = group.nth * comptime!(bp.scales());
    let channels = base + comptime!(bp.spec.block_tokens());
    if comptime!(bp.spec.granularity == Granularity::PerChannel) {
        (scales[channels + group.group], scales[base + element])
    } else {
        (scales[base + group.group], scales[channels + element])
    }
}

/// Rounds to f16 and saturates.
#[cube]
fn as_half(x: f32) -> u32 {
    half_bits(clamp(x, f32::new(-65504.0), f32::new(65504.0)))
}

/// Writes the codes and parameters of groups; one unit per group.
#[cube(launch, address_type = "dynamic")]
pub(super) fn store_groups(
    numbers: &[f32],
    scales: &[f32],
    words: &mut [u32],
    args: BlockArgs,
    side: SideArgs,
    n: usize,
    #[comptime] bp: BlockBlueprint,
) {
    if ABSOLUTE_POS < n {
        let group = group_at(ABSOLUTE_POS, bp);
        let block = block_at(group.nth, &args, bp);
        if block.leaves {
            let slot = packed_slot(block.index * comptime!(bp.spec.block_tokens()), &side);
            let base = block.slice * side.slice_words
                + slot / comptime!(bp.spec.block_tokens())
                    * comptime!(bp.spec.block_words(bp.head_dim));
            store_group(numbers, scales, words, &group, base, bp);
        }
    }
}

#[cube]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
fn store_group(
    numbers: &[f32],
    scales: &[f32],
    words: &mut [u32],
    group: &Group,
    base: usize,
    #[comptime] bp: BlockBlueprint,
) {
    let spec = comptime!(bp.spec);
    let code_words = comptime!(spec.code_words());
    let range = group_range(numbers, group.first, group.stride, spec);
    let steps = steps_of(range.0, range.1, spec);
    // The first word of codes, the distance to the next, and the word of the parameter.
    let mut word = base + group.group;
    let mut stride = comptime!(bp.head_dim).runtime();
    let mut parameter = base + comptime!(spec.code_words() * bp.head_dim) + group.group;
    if comptime!(spec.granularity == Granularity::PerToken) {
        let in_line = comptime!(bp.head_dim / spec.group_size);
        let line = base
            + group.group / in_line
                * comptime!(bp.head_dim / spec.group_size * (spec.code_words() + 1));
        word = line + group.group % in_line * code_words;
        stride = 1usize.runtime();
        parameter = line
            + comptime!(bp.head_dim / spec.group_size * spec.code_words())
            + group.group % in_line;
    }
    let codes_per_word = comptime!(spec.codes_per_word());
    let mut high = 0u32;
    for at in 0..comptime!(spec.group_size / spec.codes_per_word()) {
        let mut low = 0u32;
        for i in 0..codes_per_word {
            let x = numbers[group.first + (at * codes_per_word + i) * group.stride];
            let code = encode(x, steps.step, steps.min, spec);
            low |= low_bits(code, spec) << (i as u32 * comptime!(spec.low_bits()));
            if comptime!(spec.splits_codes()) {
                high |= (code >> 2u32) << (high_shift(at) + i as u32);
            }
        }
        words[word + low_word(at, spec) * stride] = low;
        if comptime!(spec.splits_codes()) {
            if at % 2 == 1 {
                words[word + high_word(at) * stride] = high;
                high = 0u32;
            }
        }
    }
    if comptime!(spec.tile.is_some()) {
        let scale = scale_of(scales, group, 0usize, bp).0;
        words[parameter] = as_half(steps.step * scale) | (as_half(steps.min * scale) << 16u32);
        // Units share the factors, two for each word.
        let factors =
            base + comptime!(spec.block_words(bp.head_dim) - spec.factors(bp.head_dim) / 2);
        let mut i = group.group;
        while i < comptime!(spec.factors(bp.head_dim) / 2) {
            let low = as_half(scale_of(scales, group, 2 * i, bp).1);
            let high = as_half(scale_of(scales, group, 2 * i + 1, bp).1);
            words[factors + i] = low | (high << 16u32);
            i += comptime!(spec.groups(bp.head_dim));
        }
    } else {
        words[parameter] = half_bits(steps.step) | (half_bits(steps.min) << 16u32);
    }
}

/// The place of the numbers of a block in a tensor `[slices, tokens, head_dim]`.
#[cube]
fn number_in_tensor(
    group: &Group,
    element: usize,
    args: &BlockArgs,
    skip: usize,
    #[comptime] bp: BlockBlueprint,
) -> usize {
    let at = group.first + element * group.stride - group.nth * comptime!(bp.numbers());
    let (slice, block) = (group.nth / args.blocks, group.nth % args.blocks);
    let row = slice * args.lengths.added + skip + block * comptime!(bp.spec.block_tokens());
    row * bp.head_dim + at
}

/// Writes what the codes of groups restore to into a tensor `[slices, tokens, head_dim]`; one unit
/// per group.
#[cube(launch, address_type = "dynamic")]
pub(super) fn restore_groups(
    numbers: &[f32],
    scales: &[f32],
    data: &mut [f32],
    args: BlockArgs,
    skip: usize,
    n: usize,
    #[comptime] bp: BlockBlueprint,
) {
    if ABSOLUTE_POS < n {
        let spec = comptime!(bp.spec);
        let group = group_at(ABSOLUTE_POS, bp);
        let range = group_range(numbers, group.first, group.stride, spec);
        let steps = steps_of(range.0, range.1, spec);
        for i in 0..comptime!(spec.group_size) {
            let x = numbers[group.first + i * group.stride];
            let code = encode(x, steps.step, steps.min, spec);
            let mut restored = restore(code, steps.step, steps.min, spec);
            if comptime!(spec.tile.is_some()) {
                // As it is restored from what is stored.
                let scale = scale_of(scales, &group, i, bp);
                let step = half_value(as_half(steps.step * scale.0));
                let min = half_value(as_half(steps.min * scale.0));
                restored = restore(code, step, min, spec) * half_value(as_half(scale.1));
            }
            data[number_in_tensor(&group, i, &args, skip, bp)] = restored;
        }
    }
}

/// Replaces the gradient of restored groups by the gradient of their numbers; one unit per group.
#[cube(launch, address_type = "dynamic")]
pub(super) fn gradient_groups(
    numbers: &[f32],
    scales: &[f32],
    grad: &mut [f32],
    args: BlockArgs,
    skip: usize,
    n: usize,
    #[comptime] bp: BlockBlueprint,
) {
    if ABSOLUTE_POS < n {
        let spec = comptime!(bp.spec);
        let group = group_at(ABSOLUTE_POS, bp);
        let range = group_range(numbers, group.first, group.stride, spec);
        let steps = steps_of(range.0, range.1, spec);
        let first = number_in_tensor(&group, 0usize, &args, skip, bp);
        if comptime!(spec.tile.is_some()) {
            for i in 0..comptime!(spec.group_size) {
                let scale = scale_of(scales, &group, i, bp);
                grad[first + i * group.stride] *= scale.0 * scale.1;
            }
        }
        through_range(
            numbers,
            group.first,
            grad,
            first,
            group.stride,
            range.0,
            range.1,
            steps.step,
            steps.min,
            spec,
        );
        if comptime!(spec.tile.is_some()) {
            for i in 0..comptime!(spec.group_size) {
                let scale = scale_of(scales, &group, i, bp);
                grad[first + i * group.stride] /= scale.0 * scale.1;
            }
        }
    }
}
