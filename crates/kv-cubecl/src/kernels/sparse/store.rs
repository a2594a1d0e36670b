//! Writes rows into a store.

use cubecl::{client::Client, prelude::*};

use super::rows::added;
use crate::{
    CacheFloat, Result,
    formats::QuantSpec,
    kernels::{
        elementwise,
        layout::{parameter_address, parameter_in},
    },
    sparse::{RowLayout, Stride},
};

/// Run-time numbers of the kernels that store rows.
#[derive(CubeType, CubeLaunch)]
struct StoreArgs {
    batch: usize,
    slots: usize,
    /// Channels of a row that the kernel stores, and the first of them in the rows of a call.
    channels: usize,
    first_channel: usize,
    width: usize,
    /// The most rows of a sequence in the call.
    most: usize,
    /// Tokens of a row.
    stride: usize,
    n: usize,
}

/// The row that a unit stores.
#[derive(CubeType)]
struct Stored {
    slot: usize,
    /// True if there is such a row and it is among the last that fit.
    exists: bool,
}

#[cube]
fn stored(span: &[i32], sequence: usize, nth: usize, args: &StoreArgs) -> Stored {
    let call = added(span, sequence, args.batch);
    let first = call.start / args.stride;
    let n = (call.start + call.count) / args.stride - first;
    Stored { slot: (first + nth) % args.slots, exists: nth < n && nth + args.slots >= n }
}

/// Stores channels without codes, one unit for each.
#[cube(launch, address_type = "dynamic")]
fn put_floats<R: Float>(
    rows: &[f32],
    span: &[i32],
    floats: &mut [R],
    args: StoreArgs,
    #[comptime] saturating: bool,
    #[define(R)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < args.n {
        let channel = ABSOLUTE_POS % args.channels;
        let row = ABSOLUTE_POS / args.channels;
        let (sequence, nth) = (row / args.most, row % args.most);
        let to = stored(span, sequence, nth, &args);
        if to.exists {
            let mut x = rows[row * args.width + args.first_channel + channel];
            if comptime!(saturating) {
                x = crate::formats::cube::saturate(x);
            }
            let at = (sequence * args.slots + to.slot) * args.channels + channel;
            floats[at] = R::cast_from(x);
        }
    }
}

/// Run-time numbers of the kernels that store packed rows.
#[derive(CubeType, CubeLaunch)]
struct PackedArgs {
    store: StoreArgs,
    /// Words of a sequence, in the store and in the packed rows of the call.
    sequence_words: usize,
    packed_words: usize,
    /// Words of a row that are its own.
    row_words: usize,
}

/// Copies the words that are a row's own, one unit for each.
#[cube(launch, address_type = "dynamic")]
fn put_words(packed: &[u32], span: &[i32], codes: &mut [u32], args: PackedArgs) {
    if ABSOLUTE_POS < args.store.n {
        let word = ABSOLUTE_POS % args.row_words;
        let row = ABSOLUTE_POS / args.row_words;
        let (sequence, nth) = (row / args.store.most, row % args.store.most);
        let to = stored(span, sequence, nth, &args.store);
        if to.exists {
            let from = sequence * args.packed_words + nth * args.row_words + word;
            let at = sequence * args.sequence_words + to.slot * args.row_words + word;
            codes[at] = packed[from];
        }
    }
}

/// Stores parameters that share words, one unit for each word that the call may touch, so that no
/// word has two writers. The rows of a call have adjacent slots.
#[cube(launch, address_type = "dynamic")]
fn put_parameters(
    packed: &[u32],
    span: &[i32],
    codes: &mut [u32],
    args: PackedArgs,
    words: usize,
    #[comptime] spec: QuantSpec,
) {
    if ABSOLUTE_POS < args.store.n {
        let sequence = ABSOLUTE_POS / words;
        let per_word = comptime!(32 / spec.format.parameter_bits());
        let bits = comptime!(spec.format.parameter_bits() as u32);
        let mask = comptime!(((1u64 << spec.format.parameter_bits()) - 1) as u32);
        let store = &args.store;
        let groups = store.channels / comptime!(spec.group_size);
        let call = added(span, sequence, store.batch);
        let first = call.start / store.stride;
        let end = (call.start + call.count) / store.stride;
        let word = first * groups / per_word + ABSOLUTE_POS % words;
        if first < end && word * per_word < end * groups {
            let begin = store.slots * (store.channels * comptime!(spec.n_bits as usize) / 32);
            let at = sequence * args.sequence_words + begin + word;
            let mut new = codes[at];
            for i in 0..per_word {
                let nth = word * per_word + i;
                let row = nth / groups;
                if row >= first && row < end {
                    let from = parameter_address(
                        row - first,
                        nth % groups,
                        store.most,
                        store.channels,
                        spec,
                    );
                    let from_word = packed[sequence * args.packed_words + from.word];
                    let parameter = parameter_in(from_word, from.shift, spec);
                    let shift = i as u32 * bits;
                    new = (new & !(mask << shift)) | (parameter << shift);
                }
            }
            codes[at] = new;
        }
    }
}

/// A ring with the rows before a call, one unit for each channel.
#[cube(launch, address_type = "dynamic")]
fn tail<R: Float>(
    store: &[R],
    span: &[i32],
    ring: &mut [R],
    args: StoreArgs,
    back: usize,
    ring_slots: usize,
    #[define(R)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < args.n {
        let channel = ABSOLUTE_POS % args.width;
        let row = ABSOLUTE_POS / args.width;
        let (sequence, slot) = (row / ring_slots, row % ring_slots);
        let call = added(span, sequence, args.batch);
        // The last position before the call that has this slot, and one ring more, so that it is
        // not below 0.
        let newest = call.start + ring_slots - 1;
        let position = newest - (newest - slot) % ring_slots;
        let mut x = R::from_int(0);
        if position >= ring_slots && position - ring_slots + back >= call.start {
            let from = (position - ring_slots) % args.slots;
            x = store[(sequence * args.slots + from) * args.width + channel];
        }
        ring[ABSOLUTE_POS] = x;
    }
}

fn store_args(
    layout: &RowLayout,
    [first, channels]: [usize; 2],
    most: usize,
    stride: usize,
    n: usize,
) -> StoreArgsLaunch {
    let RowLayout { batch, slots, width, .. } = *layout;
    StoreArgsLaunch::new(batch, slots, channels, first, width, most, stride, n)
}

/// Stores the channels without codes of rows `[batch, most, width]`.
pub(crate) fn launch_put_floats(
    client: &Client,
    rows: BufferArg,
    span: BufferArg,
    floats: BufferArg,
    layout: &RowLayout,
    most: usize,
    stride: Stride,
) -> Result<()> {
    let channels = layout.floats();
    let n = layout.batch * most * channels;
    let grid = elementwise(client, "put_rows", n, n.max(layout.elements()))?;
    let first = layout.width - channels;
    let float: CacheFloat = layout.format.float;
    put_floats::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        rows,
        span,
        floats,
        store_args(layout, [first, channels], most, stride.0, n),
        float.saturates(),
        float.elem(),
    );
    Ok(())
}

/// Stores packed rows, as [`quantize`](crate::KvCacheOps::quantize) makes them of
/// `[batch, 1, most, coded channels]`.
pub(crate) fn launch_put_codes(
    client: &Client,
    [packed, span, codes]: [&dyn Fn() -> BufferArg; 3],
    layout: &RowLayout,
    spec: QuantSpec,
    most: usize,
    stride: Stride,
) -> Result<()> {
    let coded = layout.width - layout.floats();
    let groups = coded / spec.group_size;
    let row_words = match spec.packs_parameters() {
        true => groups * spec.code_words(),
        false => groups * spec.words_per_group(),
    };
    let args = |n| {
        let store = store_args(layout, [0, coded], most, stride.0, n);
        let packed_words = spec.words(most, coded);
        PackedArgsLaunch::new(store, layout.sequence_words(), packed_words, row_words)
    };
    let n = layout.batch * most * row_words;
    let elements = n.max(layout.elements());
    let grid = elementwise(client, "put_rows", n, elements)?;
    put_words::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        packed(),
        span(),
        codes(),
        args(n),
    );
    if spec.packs_parameters() {
        let per_word = 32 / spec.format.parameter_bits();
        // The first word of a call may begin with a parameter of an earlier row.
        let words = (most * groups + per_word - 1).div_ceil(per_word);
        let n = layout.batch * words;
        let grid = elementwise(client, "put_rows", n, elements)?;
        put_parameters::launch(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            packed(),
            span(),
            codes(),
            args(n),
            words,
            spec,
        );
    }
    Ok(())
}

/// Copies the `back` rows before a call to a new ring of `slots` slots.
pub(crate) fn launch_tail(
    client: &Client,
    store: BufferArg,
    span: BufferArg,
    ring: BufferArg,
    layout: &RowLayout,
    back: usize,
    slots: usize,
) -> Result<()> {
    let n = layout.batch * slots * layout.width;
    let grid = elementwise(client, "tail_rows", n, n.max(layout.elements()))?;
    tail::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        store,
        span,
        ring,
        store_args(layout, [0, layout.width], slots, 1, n),
        back,
        slots,
        layout.format.float.elem(),
    );
    Ok(())
}
