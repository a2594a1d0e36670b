use cubecl::prelude::*;

use crate::{
    formats::{
        Granularity, QuantSpec,
        cube::{code_in, high_bits, low_word, offset, restore, scale},
    },
    kernels::{
        decode_attention::{DOWN, DecodeArgs, lengths_of},
        grid::cube_at,
        head_rows::{
            Board, HEADS, LOWEST, PAIRS, Sums, TILE, UNITS, add_rows, multiply, new_board, no_sums,
            own_channels, product,
        },
        layout::{
            SideArgs, begin, block_words, float_element, packed_slot, parameter_address,
            parameter_in, quantized,
        },
        scores::softcap,
    },
    layout::Sides,
};

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SharedBlueprint {
    /// Channels of keys, and of values, which are the first of them.
    pub(super) head_dim: Sides<usize>,
    /// Quantization of keys, if any.
    pub(super) spec: Option<QuantSpec>,
    /// True if a sliding window may hide tokens.
    pub(super) window: bool,
    /// True if scores have a soft cap.
    pub(super) softcap: bool,
    /// See [`Grid::flat`](crate::kernels::Grid::flat).
    pub(super) flat: bool,
}

impl SharedBlueprint {
    const fn own_channels(&self) -> usize {
        own_channels(self.head_dim.keys)
    }
}

/// The tokens of a split. They are counted without those that a sliding window hides.
#[derive(CubeType)]
struct Seen {
    slice: usize,
    /// Sinks among the tokens.
    sinks: usize,
    /// The first token past the sinks that is seen.
    begin: usize,
    /// Packed tokens after the sinks.
    packed: usize,
    /// The first token of the split, and one past its last.
    first: usize,
    last: usize,
}

/// One cube per (slice, split of the tokens, [`HEADS`] query rows); writes `(o, m, l)` of each row
/// to `partials` `[slices, rows, n_splits, head_dim + 2]`, with the head_dim of values.
#[cube(launch, address_type = "dynamic")]
#[allow(clippy::collapsible_if, reason = "the outer one is decided when the kernel is compiled")]
pub(super) fn partial_attention<R: Float, Q: Float>(
    query: &[Q],
    keys: &[u32],
    floats: &[R],
    partials: &mut [f32],
    args: DecodeArgs,
    #[comptime] bp: SharedBlueprint,
    #[define(R)] _float_type: ElemType,
    #[define(Q)] _query_type: ElemType,
) {
    let place = cube_at(args.slices, args.n_splits, comptime!(bp.flat));
    let (slice, split) = (place.x, place.y);
    let first_row = place.z * HEADS;
    if comptime!(bp.flat) {
        if first_row >= args.rows {
            terminate!();
        }
    }
    let (width, own) = comptime!((bp.head_dim.keys, bp.own_channels()));
    let mut board = new_board();
    let mut queries = Array::<f32>::new(comptime!(HEADS * bp.own_channels()));
    #[unroll]
    for h in 0..HEADS {
        // Rows past the last repeat it; they are not written.
        let row = clamp_max(first_row + h, args.rows - 1);
        #[unroll]
        for i in 0..own {
            let channel = board.unit + i * UNITS;
            queries[h * own + i] = f32::new(0.0);
            if channel < width {
                let at = (slice * args.rows + row) * width + channel;
                queries[h * own + i] = f32::cast_from(query[at]) * args.scale;
            }
        }
    }
    let lengths = lengths_of(slice, &args);
    let seen = seen_by(slice, split, lengths.len, lengths.tokens, &args, bp);
    let mut sums = no_sums(own);
    let mut rows = Array::<f32>::new(comptime!(TILE * bp.own_channels()));
    let mut first = seen.first;
    while first < seen.last {
        load_rows::<R>(keys, floats, first, &seen, &board, &mut rows, &args, bp);
        multiply(&queries, &rows, &mut board, own);
        if board.unit < PAIRS {
            let mut score = product(&mut board);
            if comptime!(bp.softcap) {
                score = softcap(score, args.softcap);
            }
            if first + board.unit % TILE >= seen.last {
                score = f32::new(LOWEST);
            }
            board.scores[board.unit] = score;
        }
        sync_cube();
        add_rows(&rows, &board, &mut sums, DOWN, own);
        first += TILE;
    }
    if lengths.tokens == 0 {
        // Marks a sequence that takes no part: sums of weights are never below 0.
        #[unroll]
        for h in 0..HEADS {
            sums.weights[h] = f32::new(-1.0);
        }
    }
    write_sums(partials, first_row, split, slice, &board, &sums, &args, bp);
}

/// Returns the tokens of a split of those that a slice's queries see.
#[cube]
fn seen_by(
    slice: usize,
    split: usize,
    len: usize,
    tokens: usize,
    args: &DecodeArgs,
    #[comptime] bp: SharedBlueprint,
) -> Seen {
    let schedule = &args.cache.schedule;
    let sinks = clamp_max(schedule.sinks, tokens);
    let mut first_seen = sinks;
    if comptime!(bp.window) {
        first_seen = clamp_max(begin(tokens, schedule), tokens);
    }
    let packed = quantized(len, &schedule.keys, schedule);
    let n = sinks + tokens - first_seen;
    let share = n.div_ceil(args.n_splits);
    let first = clamp_max(split * share, n);
    let last = clamp_max(first + share, n);
    Seen { slice, sinks, begin: first_seen, packed, first, last }
}

/// Reads the unit's channels of a tile of tokens; 0 for those past the last.
#[cube]
fn load_rows<R: Float>(
    keys: &[u32],
    floats: &[R],
    first: usize,
    seen: &Seen,
    board: &Board,
    rows: &mut Array<f32>,
    args: &DecodeArgs,
    #[comptime] bp: SharedBlueprint,
) {
    let (width, own) = comptime!((bp.head_dim.keys, bp.own_channels()));
    let (side, sinks) = (&args.cache.keys, args.cache.schedule.sinks);
    #[unroll]
    for t in 0..TILE {
        let nth = first + t;
        let mut token = nth;
        if nth >= seen.sinks {
            token = seen.begin + nth - seen.sinks;
        }
        let exists = nth < seen.last;
        let is_packed = token >= sinks && token - sinks < seen.packed;
        #[unroll]
        for i in 0..own {
            let channel = board.unit + i * UNITS;
            let mut x = f32::new(0.0);
            if exists && channel < width {
                let mut float = true;
                #[comptime]
                match comptime!(bp.spec) {
                    Some(spec) => {
                        if is_packed {
                            float = false;
                            let slot = packed_slot(token - sinks, side);
                            x = packed_key(keys, seen.slice, slot, channel, side, width, spec);
                        }
                    }
                    None => {}
                }
                if float {
                    let row = seen.slice * args.cache.float_elements + float_element(token, side);
                    x = f32::cast_from(floats[row + channel]);
                }
            }
            rows[t * own + i] = x;
        }
    }
}

/// The place of a code of a packed key.
#[derive(CubeType)]
struct CodeAddress {
    /// First word of the codes of its group.
    first: usize,
    /// Distance of these words.
    stride: usize,
    /// Index in the group.
    nth: usize,
    /// Parameter of the group.
    parameter: u32,
}

/// Returns the place of a channel of the key in a slot.
#[cube]
fn code_address(
    keys: &[u32],
    slice: usize,
    slot: usize,
    channel: usize,
    side: &SideArgs,
    #[comptime] head_dim: usize,
    #[comptime] spec: QuantSpec,
) -> CodeAddress {
    let base = slice * side.slice_words;
    let group_size = comptime!(spec.group_size);
    if comptime!(spec.granularity == Granularity::PerToken) {
        let group = channel / group_size;
        let place = parameter_address(slot, group, side.packed_tokens, head_dim, spec);
        let parameter = parameter_in(keys[base + place.word], place.shift, spec);
        let first = base
            + slot * comptime!(spec.words_of_codes(head_dim))
            + group * comptime!(spec.code_words());
        CodeAddress { first, stride: 1usize.runtime(), nth: channel % group_size, parameter }
    } else {
        let first = base + slot / group_size * block_words(head_dim, spec) + channel;
        let parameter = keys[first + comptime!(spec.code_words() * head_dim)];
        CodeAddress { first, stride: head_dim.runtime(), nth: slot % group_size, parameter }
    }
}

/// Restores a channel of the packed key in a slot.
#[cube]
fn packed_key(
    keys: &[u32],
    slice: usize,
    slot: usize,
    channel: usize,
    side: &SideArgs,
    #[comptime] head_dim: usize,
    #[comptime] spec: QuantSpec,
) -> f32 {
    let CodeAddress { first, stride, nth, parameter } =
        code_address(keys, slice, slot, channel, side, head_dim, spec);
    let codes = comptime!(spec.codes_per_word());
    let run = nth / codes;
    let low = keys[first + low_word(run, spec) * stride];
    let high = high_bits(keys, first, stride, run, spec);
    let code = code_in(low, high, nth % codes, spec);
    restore(code, scale(parameter, spec), offset(parameter, spec), spec)
}

/// Writes the sums of the unit's channels over the tokens of a split.
#[cube]
fn write_sums(
    partials: &mut [f32],
    first_row: usize,
    split: usize,
    slice: usize,
    board: &Board,
    sums: &Sums,
    args: &DecodeArgs,
    #[comptime] bp: SharedBlueprint,
) {
    let (value_dim, own) = comptime!((bp.head_dim.values, bp.own_channels()));
    #[unroll]
    for h in 0..HEADS {
        let row = first_row + h;
        if row < args.rows {
            let at = ((slice * args.rows + row) * args.n_splits + split) * (value_dim + 2);
            #[unroll]
            for i in 0..own {
                let channel = board.unit + i * UNITS;
                if channel < value_dim {
                    partials[at + channel] = sums.rows[h * own + i];
                }
            }
            if board.unit == 0 {
                partials[at + value_dim] = sums.most[h];
                partials[at + value_dim + 1] = sums.weights[h];
            }
        }
    }
}
