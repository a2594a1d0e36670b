//! Scores of the run of consecutive tokens that a unit works on.

use cubecl::prelude::*;

use super::{
    args::{CacheBuffers, DecodeArgs},
    base::DecodeBlueprint,
    rows::{Rows, zeros},
    tiles::Tile,
};
use crate::{
    formats::{
        Granularity, QuantSpec,
        cube::{element, high_shift, high_word, low_word, offset, scale},
    },
    kernels::{
        layout::{
            SideArgs, factor_in, float_element, packed_slot, parameter_address, parameter_in,
        },
        scores::softcap,
    },
};

/// The scores of the tokens of a tile that the unit works on, `[rows, unit_tokens]`; those past the
/// end of the tile are to be masked.
#[cube]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
pub(super) fn score<R: Float, N: Size>(
    buffers: &CacheBuffers<R, N>,
    slice: usize,
    tile: &Tile,
    rows: &Rows,
    args: &DecodeArgs,
    #[comptime] bp: DecodeBlueprint,
) -> Array<f32> {
    let cache = &args.cache;
    let token = tile.start + rows.unit / bp.lanes * bp.unit_tokens;
    let keys = &buffers.keys;
    let mut scores = zeros(comptime!(bp.rows * bp.unit_tokens));
    if token < tile.end {
        let spec = comptime!(bp.specs.keys);
        #[comptime]
        match spec {
            Some(spec) => {
                if tile.packed {
                    let base = slice * cache.keys.slice_words / comptime!(bp.vector);
                    let token = token - cache.schedule.sinks;
                    if comptime!(spec.granularity == Granularity::PerToken) {
                        let (side, end) = (&cache.keys, tile.end - cache.schedule.sinks);
                        score_tokens::<N>(
                            keys,
                            base,
                            token,
                            end,
                            rows,
                            &mut scores,
                            side,
                            spec,
                            bp,
                        );
                    } else {
                        let mut slot = token;
                        if comptime!(bp.window) {
                            slot = packed_slot(token, &cache.keys);
                        }
                        score_packed::<N>(keys, base, slot, rows, &mut scores, spec, bp);
                    }
                }
            }
            None => {}
        }
        if !tile.packed {
            let (base, side) = (slice * cache.float_elements, &cache.keys);
            let floats = &buffers.floats;
            score_float::<R, N>(floats, base, token, tile.end, rows, &mut scores, side, bp);
        }
    }
    if comptime!(bp.lanes > 1) {
        #[unroll]
        for i in 0..comptime!(bp.rows * bp.unit_tokens) {
            #[unroll]
            for step in 0..comptime!(bp.lanes.trailing_zeros()) {
                scores[i] += plane_shuffle_xor(scores[i], 1u32 << step);
            }
        }
    }
    if comptime!(bp.softcap) {
        #[unroll]
        for i in 0..comptime!(bp.rows * bp.unit_tokens) {
            scores[i] = softcap(scores[i], args.softcap);
        }
    }
    scores
}

/// Adds to `scores` `[rows, unit_tokens]` the products of the query with the packed keys of a
/// unit's run of tokens, over the unit's share of the channels. The run starts at `token`, counted
/// after the sinks. Keys are packed in groups of tokens.
///
/// Scale and offset are folded into the query once per channel, not once per code.
#[cube]
fn score_packed<N: Size>(
    keys: &[Vector<u32, N>],
    slice_base: usize,
    token: usize,
    state: &Rows,
    scores: &mut Array<f32>,
    #[comptime] spec: QuantSpec,
    #[comptime] bp: DecodeBlueprint,
) {
    let rows = comptime!(bp.rows);
    let unit_tokens = comptime!(bp.unit_tokens);
    let width = comptime!(bp.head_dim.keys / bp.vector);
    let codes = comptime!(spec.codes_per_word());
    let group_lines = comptime!(spec.code_words());
    let unit_lines = comptime!(bp.unit_tokens / spec.codes_per_word());
    let block_lines = comptime!(spec.block_words(bp.head_dim.keys) / bp.vector);
    let group_base = slice_base + token / spec.group_size * block_lines;
    let first_run = token % spec.group_size / codes;
    let param_base = group_base + group_lines * width;
    let mut lines = Array::<Vector<u32, N>>::new(unit_lines);
    let mut high_lines = Array::<Vector<u32, N>>::new(unit_lines);
    let mut folded = Array::<f32>::new(rows);
    let mut offsets = zeros(rows);
    for step in 0..comptime!(bp.head_dim.keys / bp.vector / bp.lanes) {
        let column = step * bp.lanes + state.lane;
        let params = keys[param_base + column];
        #[unroll]
        for i in 0..unit_lines {
            let at = group_base + low_word(first_run + i, spec) * width;
            lines[i] = keys[at + column];
            if comptime!(spec.splits_codes()) {
                high_lines[i] = keys[group_base + high_word(first_run + i) * width + column];
            }
        }
        #[unroll]
        for k in 0..comptime!(bp.vector) {
            let param = params.extract(k);
            let scale = scale(param, spec);
            let min = offset(param, spec);
            #[unroll]
            for r in 0..rows {
                let q = state.query[r * comptime!(bp.head_dim.keys) + column * bp.vector + k];
                folded[r] = q * scale;
                if comptime!(spec.format.has_offset()) {
                    offsets[r] += q * min;
                }
            }
            #[unroll]
            for i in 0..unit_lines {
                let low = lines[i].extract(k);
                let mut high = 0u32;
                if comptime!(spec.splits_codes()) {
                    high = high_lines[i].extract(k) >> high_shift(first_run + i);
                }
                add_codes(low, high, &folded, scores, i * codes, spec, bp);
            }
        }
    }
    if comptime!(spec.format.has_offset()) {
        #[unroll]
        for r in 0..rows {
            #[unroll]
            for t in 0..unit_tokens {
                scores[r * unit_tokens + t] += offsets[r];
            }
        }
    }
    if comptime!(spec.tile.is_some()) {
        let factors =
            comptime!(spec.block_words(bp.head_dim.keys) - spec.factors(bp.head_dim.keys) / 2);
        #[unroll]
        for t in 0..unit_tokens {
            let index = token % spec.group_size + t;
            let word = word_at::<N>(keys, group_base, factors + index / 2, bp.vector);
            let factor = factor_in(word, index);
            #[unroll]
            for r in 0..rows {
                scores[r * unit_tokens + t] *= factor;
            }
        }
    }
}

/// Adds the products of a run of codes with a factor for each row to `scores` `[rows,
/// unit_tokens]`, from token `first` on.
#[cube]
fn add_codes(
    low: u32,
    high: u32,
    factors: &Array<f32>,
    scores: &mut Array<f32>,
    #[comptime] first: usize,
    #[comptime] spec: QuantSpec,
    #[comptime] bp: DecodeBlueprint,
) {
    #[unroll]
    for j in 0..comptime!(spec.codes_per_word()) {
        let element = element(low, high, j, spec);
        #[unroll]
        for r in 0..comptime!(bp.rows) {
            scores[r * comptime!(bp.unit_tokens) + first + j] += factors[r] * element;
        }
    }
}

/// As [`score_packed`], for keys that are each packed by itself, with parameters that share words.
/// The run ends before `end`.
///
/// The scale of a token is multiplied with its sums where all channels that the unit reads of it
/// are of one group, and elsewhere with what its codes stand for.
#[cube]
fn score_tokens<N: Size>(
    keys: &[Vector<u32, N>],
    slice_base: usize,
    token: usize,
    end: usize,
    state: &Rows,
    scores: &mut Array<f32>,
    side: &SideArgs,
    #[comptime] spec: QuantSpec,
    #[comptime] bp: DecodeBlueprint,
) {
    let rows = comptime!(bp.rows);
    let unit_tokens = comptime!(bp.unit_tokens);
    let width = comptime!(bp.head_dim.keys / spec.codes_per_word() / bp.vector);
    // Vectors of a row; those with high bits follow pairs of others.
    let row = comptime!(spec.words_of_codes(bp.head_dim.keys) / bp.vector);
    // Channels of a vector of words, and whether all that the unit reads of a token are of one
    // group.
    let channels = comptime!(spec.codes_per_word() * bp.vector);
    let once = comptime!(bp.head_dim.keys == spec.group_size || width == bp.lanes);
    let mut slots = Array::<usize>::new(unit_tokens);
    let mut scales = Array::<f32>::new(unit_tokens);
    #[unroll]
    for t in 0..unit_tokens {
        // Tokens past the end are read as the last one; the caller masks their scores.
        let mut slot = clamp_max(token + t, end - 1);
        if comptime!(bp.window) {
            slot = packed_slot(slot, side);
        }
        slots[t] = slot;
        scales[t] = f32::new(1.0);
        if comptime!(once) {
            let group = state.lane * channels / spec.group_size;
            scales[t] = scale_of::<N>(keys, slice_base, slot, group, side, spec, bp);
        }
    }
    for step in 0..comptime!(width / bp.lanes) {
        let column = step * bp.lanes + state.lane;
        if comptime!(!once) {
            #[unroll]
            for t in 0..unit_tokens {
                let group = column * channels / spec.group_size;
                scales[t] = scale_of::<N>(keys, slice_base, slots[t], group, side, spec, bp);
            }
        }
        let mut lines = Array::<Vector<u32, N>>::new(unit_tokens);
        let mut high = Array::<u32>::new(unit_tokens);
        #[unroll]
        for t in 0..unit_tokens {
            let first = slice_base + slots[t] * row;
            lines[t] = keys[first + low_word(column, spec)];
            high[t] = 0u32;
            if comptime!(spec.splits_codes()) {
                // A vector is one word here.
                let word = keys[first + high_word(column)].extract(0usize);
                high[t] = word >> high_shift(column);
            }
        }
        let channel = column * channels;
        add_lines::<N>(&lines, &high, &scales, state, channel, scores, once, spec, bp);
    }
    if comptime!(once) {
        #[unroll]
        for r in 0..rows {
            #[unroll]
            for t in 0..unit_tokens {
                scores[r * unit_tokens + t] *= scales[t];
            }
        }
    }
}

/// Adds to `scores` `[rows, unit_tokens]` the products of the query, from `channel` on, with the
/// codes of a vector of words of each token, whose high bits are in `high` if they are split;
/// `scaled` says whether scales are multiplied later.
#[cube]
fn add_lines<N: Size>(
    lines: &Array<Vector<u32, N>>,
    high: &Array<u32>,
    scales: &Array<f32>,
    state: &Rows,
    channel: usize,
    scores: &mut Array<f32>,
    #[comptime] scaled: bool,
    #[comptime] spec: QuantSpec,
    #[comptime] bp: DecodeBlueprint,
) {
    let rows = comptime!(bp.rows);
    let codes = comptime!(spec.codes_per_word());
    let mut factors = Array::<f32>::new(rows);
    #[unroll]
    for k in 0..comptime!(bp.vector) {
        #[unroll]
        for j in 0..codes {
            let at = channel + k * codes + j;
            #[unroll]
            for r in 0..rows {
                factors[r] = state.query[r * comptime!(bp.head_dim.keys) + at];
            }
            #[unroll]
            for t in 0..comptime!(bp.unit_tokens) {
                let mut element = element(lines[t].extract(k), high[t], j, spec);
                if comptime!(!scaled) {
                    element *= scales[t];
                }
                #[unroll]
                for r in 0..rows {
                    scores[r * comptime!(bp.unit_tokens) + t] += factors[r] * element;
                }
            }
        }
    }
}

/// The scale of a group of the key in a slot, whose parameter shares a word with others.
#[cube]
fn scale_of<N: Size>(
    keys: &[Vector<u32, N>],
    slice_base: usize,
    slot: usize,
    group: usize,
    side: &SideArgs,
    #[comptime] spec: QuantSpec,
    #[comptime] bp: DecodeBlueprint,
) -> f32 {
    let place = parameter_address(slot, group, side.packed_tokens, bp.head_dim.keys, spec);
    let word = word_at::<N>(keys, slice_base, place.word, bp.vector);
    scale(parameter_in(word, place.shift, spec), spec)
}

/// Word `index` of vectors of `vector` words, from vector `base` on.
#[cube]
pub(crate) fn word_at<N: Size>(
    words: &[Vector<u32, N>],
    base: usize,
    index: usize,
    #[comptime] vector: usize,
) -> u32 {
    let line = words[base + index / vector];
    let mut word = line.extract(0usize);
    #[unroll]
    for k in 1..vector {
        word = select(index % vector == k, line.extract(k), word);
    }
    word
}

/// As [`score_packed`], for keys in float. Here `token` is counted from the first sink, and the run
/// ends before `end`.
#[cube]
fn score_float<R: Float, N: Size>(
    floats: &[Vector<R, N>],
    slice_base: usize,
    token: usize,
    end: usize,
    state: &Rows,
    scores: &mut Array<f32>,
    side: &SideArgs,
    #[comptime] bp: DecodeBlueprint,
) {
    let rows = comptime!(bp.rows);
    let unit_tokens = comptime!(bp.unit_tokens);
    let mut bases = Array::<usize>::new(unit_tokens);
    #[unroll]
    for t in 0..unit_tokens {
        // Tokens past the end are read as the last one; the caller masks their scores.
        let mut at = token + t;
        if at >= end {
            at = end - 1;
        }
        bases[t] = (slice_base + float_element(at, side)) / comptime!(bp.vector);
    }
    for step in 0..comptime!(bp.head_dim.keys / bp.vector / bp.lanes) {
        let column = step * bp.lanes + state.lane;
        #[unroll]
        for t in 0..unit_tokens {
            let key = floats[bases[t] + column];
            #[unroll]
            for k in 0..comptime!(bp.vector) {
                let channel = f32::cast_from(key.extract(k));
                #[unroll]
                for r in 0..rows {
                    let q = state.query[r * comptime!(bp.head_dim.keys) + column * bp.vector + k];
                    scores[r * unit_tokens + t] += q * channel;
                }
            }
        }
    }
}
