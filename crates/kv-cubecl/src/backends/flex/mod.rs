//! The CPU backend: kernels on slices, threads over (batch, kv head) and parts of the tokens or
//! query rows, vector code within a thread.

#![allow(
    clippy::extra_unused_type_parameters,
    reason = "macerator compiles a function for its first type parameter, used or not"
)]

mod blocks;
mod cache;
mod chunk;
mod coded;
mod decode;
mod delta;
mod pass;
mod rope;
mod slice;
mod softmax;
mod sparse;
mod steps;
mod streaming;
mod streaming_backward;

use burn::{
    backend::{
        Flex,
        ops::FloatTensorOps,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Shape, TensorData},
};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::sinks;
use crate::{
    AttentionOptions, CacheFloat, CacheState, KvCacheOps, SteGradient, Token,
    layout::{CacheLayout, PackedLayout, QuantSpec, Side, Sides, StreamSpec},
    scores::DOWN,
    shapes, simd,
};

impl KvCacheOps for Flex {
    fn quantize(input: FloatTensor<Self>, spec: QuantSpec) -> IntTensor<Self> {
        let shape: [usize; 4] = dims(&input);
        let [_, _, tokens, head_dim] = shape;
        let input = input.to_contiguous();
        let (out_shape, format) = (shapes::packed(shape, &spec), spec.format.on_cpu());
        let place = PackedLayout { spec, head_dim, tokens };
        let mut words = vec![0u32; out_shape.iter().product()];
        let slice = tokens * head_dim;
        words
            .par_chunks_mut(out_shape[2] * out_shape[3])
            .zip(input.storage::<f32>().par_chunks(slice))
            .for_each(|(words, input)| format.quantize(input, words, 0, &place));
        FlexTensor::from_data(TensorData::new(words, out_shape))
    }

    fn dequantize(
        packed: IntTensor<Self>,
        spec: QuantSpec,
        shape: [usize; 4],
    ) -> FloatTensor<Self> {
        let [_, _, tokens, head_dim] = shape;
        let (place, format) = (PackedLayout { spec, head_dim, tokens }, spec.format.on_cpu());
        let packed = packed.to_contiguous();
        let mut out = vec![0.0; shape.iter().product()];
        out.par_chunks_mut(tokens * head_dim)
            .zip(packed.storage::<u32>().par_chunks(place.words()))
            .for_each(|(out, words)| format.restore(words, 0, out, &place));
        tensor(out, shape)
    }

    fn fake_quantize(
        input: FloatTensor<Self>,
        spec: QuantSpec,
        skip: usize,
        _: SteGradient,
    ) -> FloatTensor<Self> {
        let shape: [usize; 4] = dims(&input);
        let [_, _, tokens, head_dim] = shape;
        let mut output = input.to_contiguous();
        let (grouped, format) = (grouped(tokens, skip, &spec), spec.format.on_cpu());
        output.storage_mut::<f32>().par_chunks_mut(tokens * head_dim).for_each(|slice| {
            // A few groups at a time, in one small buffer: their packed form is not kept.
            let block_tokens = spec.block_tokens();
            let step = block_tokens.max(RESTORED / block_tokens * block_tokens);
            let place = PackedLayout { spec, head_dim, tokens: step.min(grouped.len()) };
            let mut words = vec![0; place.words()];
            let part = &mut slice[grouped.start * head_dim..grouped.end * head_dim];
            for part in part.chunks_mut(step * head_dim) {
                format.quantize(part, &mut words, 0, &place);
                format.restore(&words, 0, part, &place);
            }
        });
        output
    }

    fn fake_quantize_backward(
        input: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        spec: QuantSpec,
        skip: usize,
    ) -> FloatTensor<Self> {
        let shape: [usize; 4] = dims(&input);
        let [_, _, tokens, head_dim] = shape;
        let (input, mut grad) = (input.to_contiguous(), grad.to_contiguous());
        let (grouped, format) = (grouped(tokens, skip, &spec), spec.format.on_cpu());
        let part = grouped.start * head_dim..grouped.end * head_dim;
        let place = PackedLayout { spec, head_dim, tokens: grouped.len() };
        grad.storage_mut::<f32>()
            .par_chunks_mut(tokens * head_dim)
            .zip(input.storage::<f32>().par_chunks(tokens * head_dim))
            .for_each(|(grad, input)| {
                let (input, grad) = (&input[part.clone()], &mut grad[part.clone()]);
                format.through_scales(input, grad, &place);
            });
        grad
    }

    fn round_to(input: FloatTensor<Self>, float: CacheFloat) -> FloatTensor<Self> {
        let mut output = input.to_contiguous();
        let rounded = output.storage_mut::<f32>();
        rounded.par_chunks_mut(1 << 14).for_each(|row| float.round_all(row));
        output
    }

    fn hadamard(input: FloatTensor<Self>) -> FloatTensor<Self> {
        let [.., head_dim]: [usize; 4] = dims(&input);
        let mut output = input.to_contiguous();
        hadamard_rows(output.storage_mut(), head_dim);
        output
    }

    fn write(
        state: CacheState<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        layout: CacheLayout,
        len: usize,
    ) -> CacheState<Self> {
        let [_, _, added, _]: [usize; 4] = dims(&key);
        let key = stored(floats(key), Side::Keys, &layout);
        let value = stored(floats(value), Side::Values, &layout);
        let chunks = Sides { keys: key.storage(), values: value.storage() };
        let (state, slices) = (contiguous_state(state), 0..layout.slices());
        let state = cache::flush(state, chunks, &layout, &slices, len, added);
        let kept = layout.schedule().first_kept(len + added);
        cache::append(state, chunks, &layout, &slices, len, added, |_| kept)
    }

    fn decode_attention(
        query: FloatTensor<Self>,
        state: CacheState<Self>,
        layout: CacheLayout,
        len: usize,
        tokens: usize,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (state, slices) = (contiguous_state(state), 0..layout.slices());
        let (shape, dtype) = (dims(&query), query.dtype());
        let query = stored(floats(query), Side::Keys, &layout);
        let threads = kv_device::threads::all_threads();
        let (layout, pass) = (&layout, None);
        let attend = decode::Attend { layout, len, tokens, slices, options, pass, threads };
        let (mut output, lse) = attend.run(query.storage(), shape, &state);
        undo_hadamard(&mut output, layout);
        attention(output, lse, shape, layout.shape().head_dim.values, dtype)
    }

    fn decode_attention_at(
        query: FloatTensor<Self>,
        state: CacheState<Self>,
        position: IntTensor<Self>,
        layout: CacheLayout,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let dtype = query.dtype();
        let (state, position) = (contiguous_state(state), contiguous(position));
        let query = stored(floats(query), Side::Keys, &layout);
        let positions: &[i32] = position.storage();
        let (slices, capacity) = (layout.slices() / positions.len(), layout.config().capacity);
        let sequence = |(i, &position): (usize, &i32)| {
            let tokens = usize::try_from(position).map_or(0, |position| position + 1);
            (i * slices..(i + 1) * slices, tokens.min(capacity))
        };
        let sequences: Vec<_> = positions.iter().enumerate().map(sequence).collect();
        attend_each(query, &state, &sequences, &layout, options, dtype)
    }

    fn step(
        mut state: CacheState<Self>,
        token: Token<Self>,
        layout: CacheLayout,
        len: usize,
        options: AttentionOptions,
    ) -> (CacheState<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let Token { query, key, value, position, rope } = token;
        let (capacity, dtype) = (layout.config().capacity, query.dtype());
        let [query, key, value] = [query, key, value].map(floats);
        let [_, _, tokens, _] = dims(&key);
        if tokens > 1 {
            let places = (position.into_option(), rope.into_option());
            assert!(matches!(places, (None, None)), "positions are counted, and there is no rope");
            let newest = steps::Newest { query, key, value, tokens, dtype };
            return newest.step(contiguous_state(state), &layout, len, options);
        }
        let position = position.into_option().map(contiguous);
        let counted = [len as i32];
        let positions: &[i32] = position.as_ref().map_or(&counted, |position| position.storage());
        let table = rope.into_option().map(contiguous);
        let table = table.as_ref().map(|table| {
            let [_, rotary_dim] = dims(table);
            rope::Table { data: table.storage(), rotary_dim }
        });
        let [query, key] = [query, key]
            .map(|rows| stored(rope::apply_rope(rows, positions, table), Side::Keys, &layout));
        let value = stored(value, Side::Values, &layout);
        let slices = layout.slices() / positions.len();
        let chunks = Sides { keys: key.storage(), values: value.storage() };
        state = contiguous_state(state);
        let mut sequences = Vec::with_capacity(positions.len());
        for (i, &position) in positions.iter().enumerate() {
            let slices = i * slices..(i + 1) * slices;
            // Below 0, the sequence takes no part.
            let mut len = usize::try_from(position).unwrap_or(0);
            if position >= 0 && len < capacity {
                state = cache::flush(state, chunks, &layout, &slices, len, 1);
                let kept = layout.schedule().first_kept(len + 1);
                state = cache::append(state, chunks, &layout, &slices, len, 1, |_| kept);
                len += 1;
            }
            sequences.push((slices, len.min(capacity)));
        }
        let (output, lse) = attend_each(query, &state, &sequences, &layout, options, dtype);
        (state, output, lse)
    }

    fn streaming_attention(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        key_hat: FloatTensor<Self>,
        value: FloatTensor<Self>,
        value_hat: FloatTensor<Self>,
        spec: StreamSpec,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        streaming::streaming_attention(query, [key, key_hat, value, value_hat], spec, options)
    }

    fn add_sinks(
        output: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        sink_logits: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        sinks::add::<Self>(output, lse, sink_logits)
    }

    fn streaming_attention_with_sinks(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        key_hat: FloatTensor<Self>,
        value: FloatTensor<Self>,
        value_hat: FloatTensor<Self>,
        sink_logits: FloatTensor<Self>,
        spec: StreamSpec,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (output, lse) = <Self as KvCacheOps>::streaming_attention(
            query, key, key_hat, value, value_hat, spec, options,
        );
        sinks::add::<Self>(output, lse, sink_logits)
    }

    fn streaming_attention_backward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        key_hat: FloatTensor<Self>,
        value: FloatTensor<Self>,
        value_hat: FloatTensor<Self>,
        output: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        spec: StreamSpec,
        options: AttentionOptions,
    ) -> (
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
    ) {
        let sides = [key, key_hat, value, value_hat];
        streaming_backward::backward(query, sides, output, lse, grad, spec, options)
    }
}

/// Attention of one query per sequence, in the form that the cache stores, over the first tokens of
/// its slices.
fn attend_each(
    query: FlexTensor,
    state: &CacheState<Flex>,
    sequences: &[(core::ops::Range<usize>, usize)],
    layout: &CacheLayout,
    options: AttentionOptions,
    dtype: DType,
) -> (FlexTensor, FlexTensor) {
    let shape: [usize; 4] = dims(&query);
    let value_dim = layout.shape().head_dim.values;
    let attentions = decode::of_each(sequences, |(slices, len), threads| {
        if *len == 0 {
            let rows = slices.len() * shape[1] / layout.shape().n_kv_heads;
            return (vec![0.0; rows * value_dim], vec![f32::NEG_INFINITY; rows]);
        }
        let (slices, len, pass) = (slices.clone(), *len, None);
        let attend = decode::Attend { layout, len, tokens: len, slices, options, pass, threads };
        attend.run(query.storage(), shape, state)
    });
    let (outputs, lses): (Vec<_>, Vec<_>) = attentions.into_iter().unzip();
    let mut output = outputs.concat();
    undo_hadamard(&mut output, layout);
    attention(output, lses.concat(), shape, value_dim, dtype)
}

/// `tensor` in row-major order and alone in its buffer: `storage` returns the whole buffer, even
/// where the tensor is a view of a part. A tensor that is so already is not copied.
fn contiguous(tensor: FlexTensor) -> FlexTensor {
    let layout = tensor.layout();
    let bytes = layout.num_elements() * tensor.dtype().size();
    let first = layout.start_offset() == 0 && bytes == tensor.bytes().len();
    if first && layout.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

/// A query, keys or values in f32, as the whole of a buffer.
fn floats(tensor: FlexTensor) -> FlexTensor {
    contiguous(cast(tensor, DType::F32))
}

/// `tensor` as `dtype`, a float type; as it is if it has that already.
fn cast(tensor: FlexTensor, dtype: DType) -> FlexTensor {
    if tensor.dtype() == dtype { tensor } else { Flex::float_cast(tensor, dtype.into()) }
}

/// Returns keys (or queries) or values in the form that the cache stores.
fn stored(mut rows: FlexTensor, side: Side, layout: &CacheLayout) -> FlexTensor {
    if layout.config().uses_hadamard(side) {
        hadamard_rows(rows.storage_mut(), layout.shape().head_dim[side]);
    }
    rows
}

/// Undoes the Hadamard transform of values in an output.
fn undo_hadamard(output: &mut [f32], layout: &CacheLayout) {
    if layout.config().uses_hadamard_values() {
        hadamard_rows(output, layout.shape().head_dim.values);
    }
}

/// Applies the Hadamard transform to rows of `head_dim` elements.
fn hadamard_rows(rows: &mut [f32], head_dim: usize) {
    match rows.len() <= FEW_TRANSFORMED {
        true => simd::hadamard(rows, head_dim),
        false => rows
            .par_chunks_mut(FEW_TRANSFORMED / head_dim * head_dim)
            .for_each(|rows| simd::hadamard(rows, head_dim)),
    }
}

/// [`contiguous`] for each tensor of a cache.
fn contiguous_state(state: CacheState<Flex>) -> CacheState<Flex> {
    let CacheState { keys, values, floats } = state;
    let [keys, values, floats] = [keys, values, floats].map(contiguous);
    CacheState { keys, values, floats }
}

/// Elements whose Hadamard transform takes about as long as waking a thread.
const FEW_TRANSFORMED: usize = 1 << 14;

/// About how many tokens fake quantization packs at a time; whole groups, at least one.
const RESTORED: usize = 512;

/// The tokens that fake quantization changes: those after the first `skip`; with per-channel groups
/// without an incomplete last group.
fn grouped(tokens: usize, skip: usize, spec: &QuantSpec) -> core::ops::Range<usize> {
    let start = skip.min(tokens);
    let after = tokens - start;
    start..start + after / spec.block_tokens() * spec.block_tokens()
}

fn dims<const D: usize>(tensor: &FlexTensor) -> [usize; D] {
    tensor.layout().shape().dims()
}

/// Returns the output and log-sum-exp of `attend`, which multiplies the weights of values with a
/// factor and divides the output by it. The factor is 1, so that small values lose no digits. If
/// an output is not finite, `attend` runs again with [`DOWN`]: a sum may have overflowed.
fn without_overflow(attend: impl Fn(f32) -> (Vec<f32>, Vec<f32>)) -> (Vec<f32>, Vec<f32>) {
    let (mut output, lse) = attend(1.0);
    if !simd::all_finite(&output) {
        let (again, _) = attend(DOWN);
        let both = output.iter_mut().zip(again);
        both.filter(|(x, _)| !x.is_finite()).for_each(|(x, again)| *x = again);
    }
    (output, lse)
}

/// Multiplies weights with the factor of [`without_overflow`].
fn scale_weights(weights: &mut [f32], factor: f32) {
    if factor != 1.0 {
        weights.iter_mut().for_each(|weight| *weight *= factor);
    }
}

/// Wraps the output and the log-sum-exp of a query of this shape and type.
fn attention(
    output: Vec<f32>,
    lse: Vec<f32>,
    query: [usize; 4],
    value_dim: usize,
    dtype: DType,
) -> (FlexTensor, FlexTensor) {
    let output = tensor(output, shapes::attention(query, value_dim));
    (cast(output, dtype), tensor(lse, shapes::log_sum_exp(query)))
}

fn tensor(data: Vec<f32>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(data, shape.into()))
}
