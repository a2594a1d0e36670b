//! WGPU and CUDA: Burn's CubeCL tensors bound to the kernels.

use burn::{
    backend::{
        ops::FloatTensorOps,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, FloatDType, Shape, Slice},
};
use burn_cubecl::{
    CubeBackend,
    cubecl::{
        ir::{DeviceProperties, ElemType, FloatKind},
        prelude::BufferArg,
    },
    kernel::into_contiguous,
    ops::numeric::empty_device_contiguous_dtype,
    tensor::CubeTensor,
};

use super::sinks;
use crate::{
    AttentionOptions, CacheFloat, CacheState, KvCacheOps, Result, SteGradient,
    formats::cube::{PackedInKernels, with_format},
    kernels::{
        cache::{self, CacheBindings, CacheProblem},
        chunk_attention,
        decode_attention::{self, DecodeBindings, DecodeProblem},
        quantize::{self, RestoreProblem},
        streaming_attention::{self, BackwardBindings, ForwardBindings, StreamProblem},
    },
    layout::{CacheLayout, CacheShape, QuantSpec, Side, Sides, StreamSpec},
    scores::Scores,
    shapes,
};

impl KvCacheOps for CubeBackend {
    fn quantize(input: FloatTensor<Self>, spec: QuantSpec) -> IntTensor<Self> {
        let shape = dims(&input);
        let problem = restore_problem(shape, spec);
        let input = into_contiguous(input);
        let words = empty_like(&input, shapes::packed(shape, &spec), DType::U32);
        let (client, input, out) = (&input.client, arg(&input), arg(&words));
        launched(with_format!(spec.format, F => {
            cache::launch_quantize::<F>(client, input, out, &problem)
        }));
        words
    }

    fn dequantize(packed: IntTensor<Self>, spec: QuantSpec) -> FloatTensor<Self> {
        let shape = shapes::dequantized(dims(&packed), &spec);
        let problem = restore_problem(shape, spec);
        let packed = into_contiguous(packed);
        let out = empty_like(&packed, shape, DType::F32);
        let (client, words, rows) = (&packed.client, arg(&packed), arg(&out));
        launched(with_format!(spec.format, F => {
            quantize::launch_dequantize::<F>(client, words, rows, &problem)
        }));
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
        launched(with_format!(spec.format, F => {
            quantize::launch_fake_quantize::<F>(&data.client, arg(&data), &problem, skip)
        }));
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
        launched(with_format!(spec.format, F => {
            quantize::launch_scale_gradient::<F>(client, data, out, &problem, skip)
        }));
        grad
    }

    fn round_to(input: FloatTensor<Self>, float: CacheFloat) -> FloatTensor<Self> {
        let data = writable(into_contiguous(input));
        let n = data.meta.shape().num_elements();
        launched(quantize::launch_round_trip(&data.client, arg(&data), n, float));
        data
    }

    fn rotate(input: FloatTensor<Self>) -> FloatTensor<Self> {
        let data = writable(into_contiguous(input));
        let [.., head_dim] = dims(&data);
        let n = data.meta.shape().num_elements();
        launched(quantize::launch_rotate(&data.client, arg(&data), n, head_dim));
        data
    }

    fn write(
        state: CacheState<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        layout: CacheLayout,
        len: usize,
    ) -> CacheState<Self> {
        write(state, key, value, layout, len, None)
    }

    fn decode_attention(
        query: FloatTensor<Self>,
        state: CacheState<Self>,
        layout: CacheLayout,
        len: usize,
        tokens: usize,
        options: AttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        decode_attention(query, &contiguous(state), layout, len, tokens, options, None)
    }

    fn step(
        state: CacheState<Self>,
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        position: IntTensor<Self>,
        layout: CacheLayout,
        options: AttentionOptions,
    ) -> (CacheState<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let position = into_contiguous(position);
        let position = Some(&position);
        // Launches are planned for a full cache, so that one recording of them serves every length.
        let capacity = layout.config().capacity;
        let state = write(state, key, value, layout, capacity, position);
        let (output, lse) =
            decode_attention(query, &state, layout, capacity, capacity, options, position);
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

/// Unwraps the result of a launch. The crate's functions and caches have checked the limits of the
/// device before; only direct calls of [`KvCacheOps`] can panic here.
fn launched(result: Result<()>) {
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// Checks that the device has enough cubes and wide enough indices for attention of a query of this
/// shape over `len` tokens.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported).
pub(super) fn check_decode(
    layout: &CacheLayout,
    query: [usize; 4],
    len: usize,
    properties: &DeviceProperties,
) -> Result<()> {
    let [_, heads, m, _] = query;
    let rows = heads / layout.shape().n_kv_heads * m;
    let float = ElemType::Float(FloatKind::F32);
    let (query, scores) = (float, Scores::PLAIN);
    let problem = DecodeProblem { layout: *layout, len, tokens: len, rows, float, query, scores };
    match chunk_attention::plan(&problem, properties) {
        Some(plan) => chunk_attention::grid_of(&problem, &plan, properties).map(drop),
        None => decode_attention::check_size(&problem, properties),
    }
}

fn dims(tensor: &CubeTensor) -> [usize; 4] {
    tensor.meta.shape().dims()
}

/// Keys, values and float rows of a cache.
fn cache_bindings(
    [keys, values, floats]: [&CubeTensor; 3],
    position: Option<&CubeTensor>,
) -> CacheBindings {
    let [keys, values, floats] = [keys, values, floats].map(arg);
    CacheBindings { keys, values, floats, position: position.map(positions) }
}

/// Positions, and how many there are.
fn positions(tensor: &CubeTensor) -> (BufferArg, usize) {
    (arg(tensor), tensor.meta.shape().num_elements())
}

fn arg(tensor: &CubeTensor) -> BufferArg {
    tensor.clone().into_buffer_arg()
}

fn elem(tensor: &CubeTensor) -> ElemType {
    burn::backend::cubecl::dtype_to_elem_type(tensor.dtype)
}

fn empty_like<const D: usize>(like: &CubeTensor, shape: [usize; D], dtype: DType) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    empty_device_contiguous_dtype(client, device, Shape::new(shape), dtype)
}

/// The tensor itself if nothing else holds it, else a copy: what makes a write in place safe.
fn writable(tensor: CubeTensor) -> CubeTensor {
    if tensor.can_mut() { tensor } else { tensor.copy() }
}

/// Copies each tensor of `state` that is not contiguous into a buffer of its own, because kernels
/// index buffers and know no strides.
fn contiguous(state: CacheState<CubeBackend>) -> CacheState<CubeBackend> {
    let CacheState { keys, values, floats } = state;
    let [keys, values, floats] = [keys, values, floats].map(into_contiguous);
    CacheState { keys, values, floats }
}

fn restore_problem(shape: [usize; 4], spec: QuantSpec) -> RestoreProblem {
    let [batch, heads, tokens, head_dim] = shape;
    RestoreProblem { slices: batch * heads, tokens, head_dim, spec }
}

/// Appends `key` and `value` to a cache of `len` tokens. With `position`, the kernel reads from it
/// how many tokens the cache holds; `len` is then only what the launch is planned for.
fn write(
    state: CacheState<CubeBackend>,
    key: CubeTensor,
    value: CubeTensor,
    layout: CacheLayout,
    len: usize,
    position: Option<&CubeTensor>,
) -> CacheState<CubeBackend> {
    let CacheState { mut keys, mut values, floats } = contiguous(state);
    let floats = writable(floats);
    let (key, value) = (into_contiguous(key), into_contiguous(value));
    let problem = CacheProblem { layout, len, added: dims(&key)[2], float: elem(&floats) };
    let flushes = match position {
        Some(_) => Sides { keys: true, values: true },
        None => problem.flushes(),
    };
    if flushes.keys {
        keys = writable(keys);
    }
    if flushes.values {
        values = writable(values);
    }
    let client = &floats.client;
    let formats = layout.formats();
    if problem.added == 1 {
        let Sides { keys: key_format, values: value_format } = formats;
        let bindings = cache_bindings([&keys, &values, &floats], position);
        let (chunk, key, value) = (elem(&key), arg(&key), arg(&value));
        launched(with_format!(key_format, K => with_format!(value_format, V => {
            cache::launch_write_token::<K, V>(client, key, value, bindings, chunk, &problem)
        })));
    } else {
        // Both sides, before rows are written over that they read.
        let sides = [(Side::Keys, &key, &keys), (Side::Values, &value, &values)];
        for (side, chunk, words) in sides {
            let (floats, chunk, words) = (arg(&floats), arg(chunk), arg(words));
            launched(with_format!(formats[side], F => {
                cache::launch_flush::<F>(client, floats, chunk, words, &problem, side)
            }));
        }
        for (side, chunk, _) in sides {
            launched(cache::launch_append(client, arg(chunk), arg(&floats), &problem, side));
        }
    }
    CacheState { keys, values, floats }
}

/// Attends to the first `tokens` of a cache of `len` tokens, whose tensors are contiguous. With
/// `position`, the kernel reads from it the position of the last token; `len` and `tokens` are then
/// only what the launch is planned for.
fn decode_attention(
    query: CubeTensor,
    state: &CacheState<CubeBackend>,
    layout: CacheLayout,
    len: usize,
    tokens: usize,
    options: AttentionOptions,
    position: Option<&CubeTensor>,
) -> (CubeTensor, CubeTensor) {
    let Sides { keys, values } = layout.formats();
    with_format!(keys, K => with_format!(values, V => {
        decode_attention_as::<K, V>(query, state, layout, len, tokens, options, position)
    }))
}

/// [`decode_attention`] of packed keys and values of these formats.
fn decode_attention_as<K: PackedInKernels, V: PackedInKernels>(
    query: CubeTensor,
    state: &CacheState<CubeBackend>,
    layout: CacheLayout,
    len: usize,
    tokens: usize,
    options: AttentionOptions,
    position: Option<&CubeTensor>,
) -> (CubeTensor, CubeTensor) {
    let (shape, dtype) = (dims(&query), query.dtype);
    let rows = shape[1] / layout.shape().n_kv_heads * shape[2];
    let (float, scores) = (elem(&state.floats), options.scores(shape[3]));
    let problem = DecodeProblem { layout, len, tokens, rows, float, query: elem(&query), scores };
    let plan = match position {
        Some(_) => None,
        None => chunk_attention::plan(&problem, query.client.properties()),
    };
    // Chunks are read in vectors, and are f32.
    let query = match plan {
        Some(_) => CubeBackend::float_cast(query, FloatDType::F32),
        None => query,
    };
    let problem = DecodeProblem { query: elem(&query), ..problem };
    let query = into_contiguous(query);
    let output = shapes::attention(shape, layout.shape().head_dim.values);
    let output = empty_like(&query, output, query.dtype);
    let lse = empty_like(&query, shapes::log_sum_exp(shape), DType::F32);
    let bindings = DecodeBindings {
        query: arg(&query),
        cache: cache_bindings([&state.keys, &state.values, &state.floats], position),
        output: arg(&output),
        lse: arg(&lse),
    };
    let client = &query.client;
    launched(match plan {
        Some(plan) => chunk_attention::launch_ref::<K, V>(client, bindings, &problem, &plan),
        None => decode_attention::launch_ref::<K, V>(client, bindings, &problem),
    });
    (CubeBackend::float_cast(output, dtype.into()), lse)
}

/// Attention of `m` query rows of `heads` heads over `n` tokens of keys and values of this shape.
pub(super) fn stream_problem(
    [heads, m]: [usize; 2],
    shape: CacheShape,
    n: usize,
    spec: StreamSpec,
    options: AttentionOptions,
) -> StreamProblem {
    let CacheShape { batch, n_kv_heads, head_dim } = shape;
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

#[cfg(all(test, feature = "wgpu"))]
mod wgpu_tests;
