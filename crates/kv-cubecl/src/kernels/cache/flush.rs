//! Quantizes the tokens that leave the residual.

use cubecl::prelude::*;

use super::elements::{Chunk, Element, FlushBlueprint, Lengths, read};
use crate::{
    formats::{
        Granularity,
        cube::{
            encode, greater, high_shift, high_word, lesser, low_bits, low_word, offset, parameter,
            parameter_of_norm, root_mean_square, scale, square, value,
        },
    },
    kernels::layout::{SideArgs, packed_slot, parameter_address},
};

/// A run of elements that a unit quantizes as one group, and where its words go.
#[derive(CubeType)]
struct Run {
    slice: usize,
    /// First token, counted from the first of the sequence, and first channel.
    token: usize,
    channel: usize,
    /// First word of codes, and the distance to the next.
    word: usize,
    stride: usize,
}

/// Quantizes group `group` of a block of tokens, counted after the sinks, into its words.
#[cube]
pub(super) fn flush_group<R: Float, C: Float>(
    floats: &[R],
    words: &mut [u32],
    chunk: &Chunk<C>,
    slice: usize,
    block: usize,
    group: usize,
    lengths: &Lengths,
    side: &SideArgs,
    #[comptime] bp: FlushBlueprint,
) {
    let spec = comptime!(bp.spec);
    let code_words = comptime!(spec.code_words());
    // The group's elements, and the distance between its words.
    let mut channel = group;
    let mut groups = side.head_dim;
    let mut first_word = group;
    let mut stride = side.head_dim;
    if comptime!(spec.granularity == Granularity::PerToken) {
        channel = group * spec.group_size;
        groups = side.head_dim / spec.group_size;
        first_word = group * code_words;
        stride = 1;
    }
    let first = block * comptime!(spec.block_tokens());
    let slot = packed_slot(first, side) / comptime!(spec.block_tokens());
    let base = slice * side.slice_words + slot * groups * (code_words + 1);
    let run = Run { slice, token: side.sinks + first, channel, word: base + first_word, stride };
    let param = quantize_run::<R, C>(floats, words, chunk, &run, lengths, side, bp);
    words[base + groups * code_words + group] = param;
}

/// Quantizes tokens `first..last`, counted after the sinks, where each is quantized by itself and
/// parameters share words. No other unit may write the parameters of these tokens.
#[cube]
pub(super) fn flush_tokens<R: Float, C: Float>(
    floats: &[R],
    words: &mut [u32],
    chunk: &Chunk<C>,
    slice: usize,
    first: usize,
    last: usize,
    lengths: &Lengths,
    side: &SideArgs,
    #[comptime] bp: FlushBlueprint,
) {
    let spec = comptime!(bp.spec);
    let code_words = comptime!(spec.code_words());
    let mask = comptime!(((1u64 << spec.format.parameter_bits()) - 1) as u32);
    let groups = side.head_dim / comptime!(spec.group_size);
    let base = slice * side.slice_words;
    for token in first..last {
        let slot = packed_slot(token, side);
        for group in 0..groups {
            let run = Run {
                slice,
                token: side.sinks + token,
                channel: group * spec.group_size,
                word: base + (slot * groups + group) * code_words,
                stride: 1usize,
            };
            let param = quantize_run::<R, C>(floats, words, chunk, &run, lengths, side, bp);
            let place = parameter_address(slot, group, side.packed_tokens, side.head_dim, spec);
            let others = words[base + place.word] & !(mask << place.shift);
            words[base + place.word] = others | (param << place.shift);
        }
    }
}

/// Writes the codes of a group; returns its parameter.
#[cube]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
fn quantize_run<R: Float, C: Float>(
    floats: &[R],
    words: &mut [u32],
    chunk: &Chunk<C>,
    run: &Run,
    lengths: &Lengths,
    side: &SideArgs,
    #[comptime] bp: FlushBlueprint,
) -> u32 {
    let spec = comptime!(bp.spec);
    let codes_per_word = comptime!(spec.codes_per_word());
    let mut min = f32::new(comptime!(spec.format.limit()));
    let mut max = f32::new(comptime!(-spec.format.limit()));
    let mut squares = f32::new(0.0);
    for nth in 0..comptime!(spec.group_size) {
        let x = read::<R, C>(floats, chunk, &element_of(run, nth, bp), lengths, side, bp);
        if comptime!(spec.format.scales_by_norm()) {
            squares += square(x);
        } else {
            min = lesser(min, x);
            max = greater(max, x);
        }
    }
    // Where the scale follows from the norm, the parameter of the extremes is not used.
    let of_extremes = parameter(min, max, spec);
    let zero = offset(of_extremes, spec);
    let divisor = if comptime!(spec.format.scales_by_norm()) {
        root_mean_square(squares, spec)
    } else {
        scale(of_extremes, spec)
    };
    let mut of_codes = f32::new(0.0);
    let mut high = 0u32;
    for at in 0..comptime!(spec.group_size / spec.codes_per_word()) {
        let mut low = 0u32;
        for i in 0..codes_per_word {
            let element = element_of(run, at * codes_per_word + i, bp);
            let x = read::<R, C>(floats, chunk, &element, lengths, side, bp);
            let code = encode(x, divisor, zero, spec);
            if comptime!(spec.format.scales_by_norm()) {
                of_codes += square(value(code, spec));
            }
            low |= low_bits(code, spec) << (i as u32 * comptime!(spec.low_bits()));
            if comptime!(spec.splits_codes()) {
                high |= (code >> 2u32) << (high_shift(at) + i as u32);
            }
        }
        words[run.word + low_word(at, spec) * run.stride] = low;
        // Two runs share the word of their high bits, and groups have whole pairs of runs.
        if comptime!(spec.splits_codes()) {
            if at % 2 == 1 {
                words[run.word + high_word(at) * run.stride] = high;
                high = 0u32;
            }
        }
    }
    if comptime!(spec.format.scales_by_norm()) {
        parameter_of_norm(divisor, of_codes, spec)
    } else {
        of_extremes
    }
}

/// Returns element `nth` of a run.
#[cube]
fn element_of(run: &Run, nth: usize, #[comptime] bp: FlushBlueprint) -> Element {
    if comptime!(bp.spec.granularity == Granularity::PerChannel) {
        Element { slice: run.slice, token: run.token + nth, channel: run.channel }
    } else {
        Element { slice: run.slice, token: run.token, channel: run.channel + nth }
    }
}

/// The tokens of a slice that [`flush`] quantizes, counted after the sinks.
#[derive(CubeType, CubeLaunch)]
pub(super) struct FlushRuns {
    pub(super) first: usize,
    /// One past the last.
    pub(super) last: usize,
    /// Tokens at whose multiples runs begin.
    pub(super) alignment_tokens: usize,
    /// Number of runs; the first and the last may be shorter.
    pub(super) runs: usize,
    /// Groups of a run that are a unit each.
    pub(super) groups: usize,
}

/// One unit per (slice, block of tokens, group); where parameters share words, one per (slice, run
/// of tokens), so that no word has two writers.
#[cube(launch, address_type = "dynamic")]
pub(super) fn flush<R: Float>(
    floats: &[R],
    chunk: Chunk<f32>,
    words: &mut [u32],
    lengths: Lengths,
    side: SideArgs,
    n: usize,
    runs: FlushRuns,
    #[comptime] bp: FlushBlueprint,
    #[define(R)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < n {
        if comptime!(bp.spec.packs_parameters()) {
            let slice = ABSOLUTE_POS / runs.runs;
            let part = runs.first / runs.alignment_tokens + ABSOLUTE_POS % runs.runs;
            let first = clamp_min(part * runs.alignment_tokens, runs.first);
            let end = part * runs.alignment_tokens + runs.alignment_tokens;
            let last = clamp_max(end, runs.last);
            flush_tokens::<R, f32>(floats, words, &chunk, slice, first, last, &lengths, &side, bp);
        } else {
            let (row, group) = (ABSOLUTE_POS / runs.groups, ABSOLUTE_POS % runs.groups);
            let slice = row / runs.runs;
            let block = runs.first / runs.alignment_tokens + row % runs.runs;
            flush_group::<R, f32>(floats, words, &chunk, slice, block, group, &lengths, &side, bp);
        }
    }
}
