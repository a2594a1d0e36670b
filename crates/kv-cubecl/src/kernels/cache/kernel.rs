use cubecl::prelude::*;

use crate::{
    formats::{
        Granularity, QuantSpec,
        cube::{
            encode, greater, high_shift, high_word, lesser, limited, low_bits, low_word, offset,
            parameter, saturate, scale,
        },
    },
    kernels::{
        layout::{
            CacheArgs, SideArgs, SideScheduleArgs, float_element, packed_slot, parameter_place,
            quantized,
        },
        rope::{RopeArgs, apply_rope},
    },
};

/// The tokens that are appended, and those they follow.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Source {
    /// Tokens in the cache before the chunk.
    pub(super) len: usize,
    /// Tokens of the chunk.
    pub(super) added: usize,
    /// Elements of the float rows of one slice of the cache.
    pub(super) float_elements: usize,
    /// Rope table for the rows of the chunk, if there is one.
    pub(super) rope: RopeArgs,
}

/// Reads one channel of a token of the chunk, after rope if there is a table.
#[cube]
fn new_element<C: Float>(
    chunk: &[C],
    table: &ComptimeOption<Box<[f32]>>,
    slice: usize,
    token: usize,
    channel: usize,
    source: &Source,
    side: &SideArgs,
) -> f32 {
    let row = (slice * source.added + token - source.len) * side.head_dim;
    apply_rope::<C>(chunk, row, channel, table, token, &source.rope)
}

/// One channel of a token past the sinks, from its ring or from the chunk, rounded to the stored
/// type and as large as the packed format takes it.
#[cube]
fn read<R: Float, C: Float>(
    floats: &[R],
    chunk: &[C],
    table: &ComptimeOption<Box<[f32]>>,
    slice: usize,
    token: usize,
    channel: usize,
    source: &Source,
    side: &SideArgs,
    #[comptime] spec: QuantSpec,
    #[comptime] saturating: bool,
) -> f32 {
    let x = if token < source.len {
        let row = slice * source.float_elements + float_element(token, side);
        f32::cast_from(floats[row + channel])
    } else {
        let x = new_element::<C>(chunk, table, slice, token, channel, source, side);
        rounded::<R>(x, saturating)
    };
    limited(x, spec)
}

/// `x` as it is stored in float. Rows narrower than f32 saturate.
#[cube]
fn rounded<R: Float>(x: f32, #[comptime] saturating: bool) -> f32 {
    if comptime!(saturating) {
        f32::cast_from(R::cast_from(saturate(x)))
    } else {
        f32::cast_from(R::cast_from(x))
    }
}

/// A run of elements that a unit quantizes as one group, and where its words go.
#[derive(CubeType)]
struct Run {
    /// First token, counted from the first of the sequence, and first channel.
    token: usize,
    channel: usize,
    /// First word of codes, and the distance to the next.
    word: usize,
    stride: usize,
}

/// Quantizes group `group` of a block of tokens, counted after the sinks, into its words.
#[cube]
fn flush_group<R: Float, C: Float>(
    floats: &[R],
    chunk: &[C],
    table: &ComptimeOption<Box<[f32]>>,
    words: &mut [u32],
    slice: usize,
    block_tokens: usize,
    group: usize,
    source: &Source,
    side: &SideArgs,
    #[comptime] spec: QuantSpec,
    #[comptime] saturating: bool,
) {
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
    let token = side.sinks + block_tokens * comptime!(spec.block_tokens());
    let slot = packed_slot(block_tokens * comptime!(spec.block_tokens()), side)
        / comptime!(spec.block_tokens());
    let base = slice * side.slice_words + slot * groups * (code_words + 1);
    let run = Run { token, channel, word: base + first_word, stride };
    let param = quantize_run::<R, C>(
        floats, chunk, table, words, slice, &run, source, side, spec, saturating,
    );
    words[base + groups * code_words + group] = param;
}

/// Quantizes tokens `first..last`, counted after the sinks, where each is quantized by itself and
/// parameters share words: no other unit may write those of these tokens.
#[cube]
fn flush_tokens<R: Float, C: Float>(
    floats: &[R],
    chunk: &[C],
    table: &ComptimeOption<Box<[f32]>>,
    words: &mut [u32],
    slice: usize,
    first: usize,
    last: usize,
    source: &Source,
    side: &SideArgs,
    #[comptime] spec: QuantSpec,
    #[comptime] saturating: bool,
) {
    let code_words = comptime!(spec.code_words());
    let mask = comptime!(((1u64 << spec.format.parameter_bits()) - 1) as u32);
    let groups = side.head_dim / comptime!(spec.group_size);
    let base = slice * side.slice_words;
    for token in first..last {
        let slot = packed_slot(token, side);
        for group in 0..groups {
            let run = Run {
                token: side.sinks + token,
                channel: group * spec.group_size,
                word: base + (slot * groups + group) * code_words,
                stride: 1usize,
            };
            let param = quantize_run::<R, C>(
                floats, chunk, table, words, slice, &run, source, side, spec, saturating,
            );
            let place = parameter_place(slot, group, side.packed_tokens, side.head_dim, spec);
            let others = words[base + place.word] & !(mask << place.shift);
            words[base + place.word] = others | (param << place.shift);
        }
    }
}

/// Writes the codes of a group; returns its parameter.
#[cube]
fn quantize_run<R: Float, C: Float>(
    floats: &[R],
    chunk: &[C],
    table: &ComptimeOption<Box<[f32]>>,
    words: &mut [u32],
    slice: usize,
    run: &Run,
    source: &Source,
    side: &SideArgs,
    #[comptime] spec: QuantSpec,
    #[comptime] saturating: bool,
) -> u32 {
    let group_size = comptime!(spec.group_size);
    let codes_per_word = comptime!(spec.codes_per_word());
    let token_step = comptime!(usize::from(spec.granularity == Granularity::PerChannel));
    let channel_step = comptime!(usize::from(spec.granularity == Granularity::PerToken));

    let mut min = f32::new(comptime!(spec.format.limit()));
    let mut max = f32::new(comptime!(-spec.format.limit()));
    for i in 0..group_size {
        let (token, channel) = (run.token + i * token_step, run.channel + i * channel_step);
        let x = read::<R, C>(
            floats, chunk, table, slice, token, channel, source, side, spec, saturating,
        );
        min = lesser(min, x);
        max = greater(max, x);
    }
    let param = parameter(min, max, spec);
    let (scale, offset) = (scale(param, spec), offset(param, spec));
    let mut high = 0u32;
    for at in 0..comptime!(spec.group_size / spec.codes_per_word()) {
        let mut low = 0u32;
        for i in 0..codes_per_word {
            let nth = at * codes_per_word + i;
            let token = run.token + nth * token_step;
            let channel = run.channel + nth * channel_step;
            let x = read::<R, C>(
                floats, chunk, table, slice, token, channel, source, side, spec, saturating,
            );
            let code = encode(x, scale, offset, spec);
            low |= low_bits(code, spec) << (i as u32 * comptime!(spec.low_bits()));
            if comptime!(spec.splits_codes()) {
                high |= (code >> 2u32) << (high_shift(at) + i as u32);
            }
        }
        words[run.word + low_word(at, spec) * run.stride] = low;
        // Two runs share the word of their high bits.
        if comptime!(spec.splits_codes()) {
            words[run.word + high_word(at) * run.stride] = high;
            if at % 2 == 1 {
                high = 0u32;
            }
        }
    }
    param
}

/// Stores one element of the chunk, unless its token is between the sinks and `first_kept` and so
/// is packed already or hidden by the window. Rows narrower than f32 saturate.
#[cube]
fn store<R: Float, C: Float>(
    chunk: &[C],
    table: &ComptimeOption<Box<[f32]>>,
    floats: &mut [R],
    slice: usize,
    token: usize,
    channel: usize,
    first_kept: usize,
    source: &Source,
    side: &SideArgs,
    #[comptime] saturating: bool,
) {
    if token < side.sinks || token >= first_kept {
        let to = slice * source.float_elements + float_element(token, side);
        let x = new_element::<C>(chunk, table, slice, token, channel, source, side);
        if comptime!(saturating) {
            floats[to + channel] = R::cast_from(saturate(x));
        } else {
            floats[to + channel] = R::cast_from(x);
        }
    }
}

/// One unit per (slice, block_tokens, group); where parameters share words, one per (slice, run of
/// tokens), so that no word has two writers.
#[cube(launch, address_type = "dynamic")]
pub(super) fn flush<R: Float>(
    floats: &[R],
    chunk: &[f32],
    words: &mut [u32],
    source: Source,
    side: SideArgs,
    n: usize,
    runs: FlushRuns,
    #[comptime] spec: QuantSpec,
    #[comptime] saturating: bool,
    #[define(R)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < n {
        if comptime!(spec.packs_parameters()) {
            let part = runs.first / runs.alignment_tokens + ABSOLUTE_POS % runs.runs;
            flush_tokens::<R, f32>(
                floats,
                chunk,
                &ComptimeOption::new_None(),
                words,
                ABSOLUTE_POS / runs.runs,
                clamp_min(part * runs.alignment_tokens, runs.first),
                clamp_max(part * runs.alignment_tokens + runs.alignment_tokens, runs.last),
                &source,
                &side,
                spec,
                saturating,
            );
        } else {
            let row = ABSOLUTE_POS / runs.groups;
            flush_group::<R, f32>(
                floats,
                chunk,
                &ComptimeOption::new_None(),
                words,
                row / runs.runs,
                runs.first / runs.alignment_tokens + row % runs.runs,
                ABSOLUTE_POS % runs.groups,
                &source,
                &side,
                spec,
                saturating,
            );
        }
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

/// Stores one side of the chunk, one unit per (slice, token, channel).
#[cube(launch, address_type = "dynamic")]
pub(super) fn append<R: Float>(
    chunk: &[f32],
    floats: &mut [R],
    source: Source,
    side: SideArgs,
    n: usize,
    first_kept: usize,
    #[comptime] saturating: bool,
    #[define(R)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < n {
        let channel = ABSOLUTE_POS % side.head_dim;
        let row = ABSOLUTE_POS / side.head_dim;
        let token = source.len + row % source.added;
        let slice = row / source.added;
        store::<R, f32>(
            chunk,
            &ComptimeOption::new_None(),
            floats,
            slice,
            token,
            channel,
            first_kept,
            &source,
            &side,
            saturating,
        );
    }
}

/// Compile-time parameters of [`write_token`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct TokenBlueprint {
    /// Quantization of keys, if any.
    pub(super) keys: Option<QuantSpec>,
    /// Quantization of values, if any.
    pub(super) values: Option<QuantSpec>,
    /// True if rows are narrower than f32.
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

/// Run-time numbers of [`write_token`].
#[derive(CubeType, CubeLaunch)]
pub(super) struct TokenArgs {
    pub(super) source: Source,
    pub(super) cache: CacheArgs,
    /// Largest number of key blocks and value blocks that leave the residual; at least 1.
    pub(super) key_blocks: usize,
    pub(super) value_blocks: usize,
    /// Units that share the channels of a key, and of a value: [`runs`].
    pub(super) key_runs: usize,
    pub(super) value_runs: usize,
    /// Slices that share a position.
    pub(super) position_slices: usize,
    /// Units of keys, and of both sides.
    pub(super) n_keys: usize,
    /// Units that work on either side.
    pub(super) n: usize,
}

/// Writes one side of a token that is appended to `source.len` others, and quantizes what leaves
/// the window for it: `unit` counts (slice, block_tokens that may leave, run of channels).
///
/// A slot that is read for what leaves and written for what comes belongs to one unit: it can only
/// be in the first block_tokens that leaves.
#[cube]
fn write_side<R: Float, C: Float>(
    chunk: &[C],
    table: &ComptimeOption<Box<[f32]>>,
    floats: &mut [R],
    words: &mut [u32],
    position: &ComptimeOption<Box<[i32]>>,
    unit: usize,
    blocks: usize,
    runs: usize,
    args: &TokenArgs,
    side: &SideArgs,
    schedule: &SideScheduleArgs,
    #[comptime] spec: Option<QuantSpec>,
    #[comptime] saturating: bool,
) {
    let row = unit / runs;
    let slice = row / blocks;
    let mut len = args.source.len;
    #[comptime]
    match position {
        ComptimeOption::Some(position) => {
            let position = position[slice / args.position_slices];
            len = args.cache.capacity;
            if position >= 0 {
                len = position as usize;
            }
        }
        ComptimeOption::None => {}
    }
    if len < args.cache.capacity {
        let (added, float_elements) = (args.source.added, args.source.float_elements);
        let rope = args.source.rope.copied();
        let source = Source { len, added, float_elements, rope };
        let index = row % blocks;
        let group = unit % runs;
        write_unit::<R, C>(
            chunk,
            table,
            floats,
            words,
            slice,
            index,
            group,
            side.head_dim / runs,
            &source,
            side,
            schedule,
            &args.cache,
            spec,
            saturating,
        );
    }
}

/// Runs one unit of [`write_side`] in a cache that is not full.
#[cube]
#[allow(clippy::single_match, reason = "decided when the kernel is compiled")]
fn write_unit<R: Float, C: Float>(
    chunk: &[C],
    table: &ComptimeOption<Box<[f32]>>,
    floats: &mut [R],
    words: &mut [u32],
    slice: usize,
    index: usize,
    group: usize,
    channels: usize,
    source: &Source,
    side: &SideArgs,
    schedule: &SideScheduleArgs,
    cache: &CacheArgs,
    #[comptime] spec: Option<QuantSpec>,
    #[comptime] saturating: bool,
) {
    let before = quantized(source.len, schedule, &cache.schedule);
    let after = quantized(source.len + 1, schedule, &cache.schedule);
    #[comptime]
    match spec {
        Some(spec) => {
            let block_tokens = comptime!(spec.block_tokens());
            if comptime!(spec.packs_parameters()) {
                flush_tokens::<R, C>(
                    &*floats, chunk, table, words, slice, before, after, source, side, spec,
                    saturating,
                );
            } else if index < (after - before) / block_tokens {
                flush_group::<R, C>(
                    &*floats,
                    chunk,
                    table,
                    words,
                    slice,
                    before / block_tokens + index,
                    group,
                    source,
                    side,
                    spec,
                    saturating,
                );
            }
        }
        None => {}
    }
    if index == 0 {
        let channel = group * channels;
        let (token, first) = (source.len, cache.schedule.sinks + after);
        for i in 0..channels {
            store::<R, C>(
                chunk,
                table,
                floats,
                slice,
                token,
                channel + i,
                first,
                source,
                side,
                saturating,
            );
        }
    }
}

/// Appends one token, both sides, with all that leaves the residual for it: first the units of the
/// keys, then those of the values.
///
/// A sequence holds as many tokens as its position says, or as the source where there is none; if
/// it is full, or its position is below 0, nothing is written. With a table, rope is
/// applied to keys first.
#[cube(launch, address_type = "dynamic")]
pub(super) fn write_token<R: Float, C: Float>(
    key: &[C],
    value: &[C],
    floats: &mut [R],
    key_words: &mut [u32],
    value_words: &mut [u32],
    position: ComptimeOption<Box<[i32]>>,
    rope: ComptimeOption<Box<[f32]>>,
    args: TokenArgs,
    #[comptime] bp: TokenBlueprint,
    #[define(R)] _dtype: ElemType,
    #[define(C)] _chunk: ElemType,
) {
    let cache = &args.cache;
    if ABSOLUTE_POS < args.n_keys {
        write_side::<R, C>(
            key,
            &rope,
            floats,
            key_words,
            &position,
            ABSOLUTE_POS,
            args.key_blocks,
            args.key_runs,
            &args,
            &cache.keys,
            &cache.schedule.keys,
            bp.keys,
            bp.saturating,
        );
    } else if ABSOLUTE_POS < args.n {
        write_side::<R, C>(
            value,
            &ComptimeOption::new_None(),
            floats,
            value_words,
            &position,
            ABSOLUTE_POS - args.n_keys,
            args.value_blocks,
            args.value_runs,
            &args,
            &cache.values,
            &cache.schedule.values,
            bp.values,
            bp.saturating,
        );
    }
}
