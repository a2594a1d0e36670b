//! WGPU and CUDA: Burn's CubeCL tensors bound to the kernels.

mod cache;
mod delta;
mod sparse;
mod tensors;

use burn::{
    backend::{
        ops::{FloatTensorOps, IntTensorOps},
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Shape, Slice},
};
use burn_cubecl::{
    CubeBackend, kernel::into_contiguous, ops::numeric::zeros_client, tensor::CubeTensor,
};

use self::{
    cache::StepTensors,
    tensors::{arg, dims, elem, empty_like, launched, writable},
};
use super::sinks;
use crate::{
    AttentionOptions, CacheFloat, CacheState, KvCacheOps, SteGradient, Token,
    kernels::{
        cache::{
            launch_fake_quantize_blocks, launch_gradient_blocks, launch_quantize,
            launch_quantize_blocks,
        },
        hadamard::RopeBefore,
        quantize::{self, RestoreProblem},
        streaming_attention::{self, BackwardBindings, ForwardBindings, StreamProblem},
    },
    layout::{CacheLayout, CacheShape, QuantSpec, Sides, StreamSpec},
    shapes,
};

impl KvCacheOps for CubeBackend {
    fn quantize(input: FloatTensor<Self>, spec: QuantSpec) -> IntTensor<Self> {
        let shape = dims(&input);
        let problem = restore_problem(shape, spec);
        let input = into_contiguous(input);
        let shape = shapes::packed(shape, &spec);
        let words = match spec.packs_parameters() {
            // Where parameters share words, they are put beside what is there.
            true => {
                let (client, device) = (input.client.clone(), input.device.clone());
                // Rows of more axes may be apart.
                let flat = Shape::new([shape.iter().product()]);
                let zeros = zeros_client(client, device, flat, DType::U32);
                Self::int_reshape(zeros, Shape::new(shape))
            }
            false => empty_like(&input, shape, DType::U32),
        };
        let (client, input, out) = (&input.client, arg(&input), arg(&words));
        launched(match spec.reads_twice() {
            true => launch_quantize_blocks(client, input, out, &problem),
            false => launch_quantize(client, input, out, &problem),
        });
        words
    }

    fn dequantize(
        packed: IntTensor<Self>,
        spec: QuantSpec,
        shape: [usize; 4],
    ) -> FloatTensor<Self> {
        let problem = restore_problem(shape, spec);
        let packed = into_contiguous(packed);
        let out = empty_like(&packed, shape, DType::F32);
        let (client, words, rows) = (&packed.client, arg(&packed), arg(&out));
        launched(quantize::launch_dequantize(client, words, rows, &problem));
        out
    }

    fn fake_quantize(
        input: FloatTensor<Self>,
        spec: QuantSpec,
        skip: usize,
        _: SteGradient,
    ) -> FloatTensor<Self> {
        let problem = restore_problem(dims(&input), spec);
        let data = writable(into_contiguous(input));
        let client = &data.client;
        launched(match spec.reads_twice() {
            true => launch_fake_quantize_blocks(client, arg(&data), arg(&data), &problem, skip),
            false => quantize::launch_fake_quantize(client, arg(&data), &problem, skip),
        });
        data
    }

    fn fake_quantize_backward(
        input: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        spec: QuantSpec,
        skip: usize,
    ) -> FloatTensor<Self> {
        let problem = restore_problem(dims(&input), spec);
        let (input, grad) = (into_contiguous(input), writable(into_contiguous(grad)));
        let (client, data, out) = (&grad.client, arg(&input), arg(&grad));
        launched(match spec.reads_twice() {
            true => launch_gradient_blocks(client, data, out, &problem, skip),
            false => quantize::launch_scale_gradient(client, data, out, &problem, skip),
        });
        grad
    }

    fn round_to(input: FloatTensor<Self>, float: CacheFloat) -> FloatTensor<Self> {
        let data = writable(into_contiguous(input));
        let n = data.meta.shape().num_elements();
        launched(quantize::launch_round_trip(&data.client, arg(&data), n, float));
        data
    }

    fn hadamard(input: FloatTensor<Self>) -> FloatTensor<Self> {
        cache::hadamard(into_contiguous(input), RopeBefore::default())
    }

    fn write(
        state: CacheState<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        layout: CacheLayout,
        len: usize,
    ) -> CacheState<Self> {
        cache::write(state, key, value, layout, len, StepTensors::default())
    }

    fn decode_attention(
        query: FloatTensor<Self>,
        state: CacheState<Self>,
        layout: CacheLayout,
        len: usize,
        tokens: usize,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let state = cache::contiguous(state);
        cache::decode_attention(query, &state, layout, len, tokens, options, StepTensors::default())
    }

    fn decode_attention_at(
        query: FloatTensor<Self>,
        state: CacheState<Self>,
        position: IntTensor<Self>,
        layout: CacheLayout,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (state, position) = (cache::contiguous(state), into_contiguous(position));
        let step = StepTensors { position: Some(&position), rope: None };
        // Planned for a full cache, as in `step`.
        let tokens = layout.config().capacity;
        cache::decode_attention(query, &state, layout, tokens, tokens, options, step)
    }

    fn step(
        state: CacheState<Self>,
        token: Token<Self>,
        layout: CacheLayout,
        len: usize,
        options: AttentionOptions,
    ) -> (CacheState<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let Token { query, key, value, position, rope } = token;
        let position = position.into_option().map(into_contiguous);
        let table = rope.into_option().map(into_contiguous);
        let step = StepTensors { position: position.as_ref(), rope: table.as_ref() };
        let (before, after) = match step.position {
            None => (len, len + 1),
            // Planned for a full cache, so one graph capture replays at every length.
            Some(_) => (layout.config().capacity, layout.config().capacity),
        };
        let state = cache::write(state, key, value, layout, before, step);
        let (output, lse) =
            cache::decode_attention(query, &state, layout, after, after, options, step);
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
        let shape = dims(&query);
        let problem = stream_problem_of(&query, &key, &value, spec, options);
        let [query, key, key_hat, value, value_hat] =
            [query, key, key_hat, value, value_hat].map(into_contiguous);
        let output = shapes::attention(shape, problem.head_dim.values);
        let output = empty_like(&query, output, query.dtype);
        let lse = empty_like(&query, shapes::log_sum_exp(shape), DType::F32);
        let bindings = ForwardBindings {
            query: arg(&query),
            key: arg(&key),
            key_hat: arg(&key_hat),
            value: arg(&value),
            value_hat: arg(&value_hat),
            output: arg(&output),
            lse: arg(&lse),
        };
        let query_type = elem(&query);
        launched(streaming_attention::launch_forward(
            &query.client,
            bindings,
            query_type,
            &problem,
        ));
        (output, lse)
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
        let (query_shape, key_shape, value_shape) = (dims(&query), dims(&key), dims(&value));
        let problem = stream_problem_of(&query, &key, &value, spec, options);
        let [batch, heads, m, _] = query_shape;
        let delta = Self::float_sum_dim(Self::float_mul(output, grad.clone()), 3);
        let stats = [lse, delta].map(|x| Self::float_reshape(x, Shape::new([1, batch * heads, m])));
        let stats = into_contiguous(Self::float_cat(stats.into(), 0));
        // Floats and their restored forms share a buffer, so that the kernels stay within the eight
        // bindings that WebGPU guarantees.
        let keys = into_contiguous(Self::float_cat(vec![key, key_hat], 0));
        let values = into_contiguous(Self::float_cat(vec![value, value_hat], 0));
        let (query, grad) = (into_contiguous(query), into_contiguous(grad));
        let query_grad = empty_like(&query, query_shape, DType::F32);
        let [key_len, value_len] =
            [key_shape, value_shape].map(|shape| shape.iter().product::<usize>());
        let side_grads = empty_like(&query, [2 * (key_len + value_len)], DType::F32);
        let bindings = BackwardBindings {
            inputs: || [&query, &keys, &values, &grad, &stats].map(arg),
            query_grad: arg(&query_grad),
            side_grads: arg(&side_grads),
        };
        launched(streaming_attention::launch_backward(&query.client, bindings, &problem));
        let part = |start: usize, shape: [usize; 4]| {
            let elements = Slice::from(start..start + shape.iter().product::<usize>());
            let part = Self::float_slice(side_grads.clone(), &[elements]);
            Self::float_reshape(part, Shape::new(shape))
        };
        let (key, key_hat) = (part(0, key_shape), part(key_len, key_shape));
        let value = part(2 * key_len, value_shape);
        let value_hat = part(2 * key_len + value_len, value_shape);
        (query_grad, key, key_hat, value, value_hat)
    }
}

pub(super) use cache::check_decode;

fn restore_problem(shape: [usize; 4], spec: QuantSpec) -> RestoreProblem {
    let [batch, heads, tokens, head_dim] = shape;
    RestoreProblem { slices: batch * heads, tokens, head_dim, spec }
}

/// Attention of `m` query rows of `heads` heads over `n` tokens of keys and values of this shape.
pub(super) fn stream_problem(
    [heads, m]: [usize; 2],
    shape: CacheShape,
    n: usize,
    spec: StreamSpec,
    options: AttentionOptions,
) -> StreamProblem {
    let CacheShape { batch, n_kv_heads, head_dim, .. } = shape;
    let (slices, n_rep) = (batch * n_kv_heads, heads / n_kv_heads);
    let scores = options.scores(head_dim.keys);
    StreamProblem { spec, slices, n_rep, m, n, head_dim, scores }
}

/// [`stream_problem`] of these tensors.
fn stream_problem_of(
    query: &CubeTensor,
    key: &CubeTensor,
    value: &CubeTensor,
    spec: StreamSpec,
    options: AttentionOptions,
) -> StreamProblem {
    let [_, heads, m, _] = dims(query);
    let ([batch, n_kv_heads, n, keys], [_, _, _, values]) = (dims(key), dims(value));
    let shape = CacheShape::new(batch, n_kv_heads, Sides { keys, values });
    stream_problem([heads, m], shape, n, spec, options)
}
