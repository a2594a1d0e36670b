//! A cache written and attended to.

use burn::{
    backend::ops::FloatTensorOps,
    tensor::{DType, FloatDType},
};
use burn_cubecl::{
    CubeBackend,
    cubecl::{
        ir::{DeviceProperties, ElemType, FloatKind},
        prelude::BufferArg,
    },
    kernel::into_contiguous,
    tensor::CubeTensor,
};

use super::{arg, dims, elem, empty_like, launched, writable};
use crate::{
    AttentionOptions, CacheState, Result,
    kernels::{
        cache::{self, CacheBindings, CacheProblem},
        chunk_attention,
        decode_attention::{self, DecodeBindings, DecodeProblem},
        rope::{self, RotaryBinding},
    },
    layout::{CacheLayout, Side, Sides},
    scores::Scores,
    shapes,
};

/// Where one token stands: beside what the host counts.
#[derive(Clone, Copy, Default)]
pub(super) struct Place<'a> {
    /// Contiguous, as [`TokenPosition::Stored`](crate::TokenPosition::Stored).
    pub(super) position: Option<&'a CubeTensor>,
    /// Contiguous, as [`TokenRope::Table`](crate::TokenRope::Table).
    pub(super) rope: Option<&'a CubeTensor>,
}

/// Appends `key` and `value` to a cache of `len` tokens. With a position, the kernel reads from it
/// how many tokens the cache holds; `len` is then only what the launch is planned for. A table
/// turns the key of one token.
pub(super) fn write(
    state: CacheState<CubeBackend>,
    key: CubeTensor,
    value: CubeTensor,
    layout: CacheLayout,
    len: usize,
    place: Place<'_>,
) -> CacheState<CubeBackend> {
    let CacheState { mut keys, mut values, floats } = contiguous(state);
    let floats = writable(floats);
    let (key, value) = (into_contiguous(key), into_contiguous(value));
    let problem = CacheProblem { layout, len, added: dims(&key)[2], float: elem(&floats) };
    let flushes = match place.position {
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
    if problem.added == 1 {
        let bindings = cache_bindings([&keys, &values, &floats], place);
        let (chunk, key, value) = (elem(&key), arg(&key), arg(&value));
        launched(cache::launch_write_token(client, key, value, bindings, chunk, &problem));
    } else {
        // Both sides, before rows are written over that they read.
        let sides = [(Side::Keys, &key, &keys), (Side::Values, &value, &values)];
        for (side, chunk, words) in sides {
            let (floats, chunk, words) = (arg(&floats), arg(chunk), arg(words));
            launched(cache::launch_flush(client, floats, chunk, words, &problem, side));
        }
        for (side, chunk, _) in sides {
            launched(cache::launch_append(client, arg(chunk), arg(&floats), &problem, side));
        }
    }
    CacheState { keys, values, floats }
}

/// Attends to the first `tokens` of a cache of `len` tokens, whose tensors are contiguous. With a
/// position, the kernel reads from it the position of the last token; `len` and `tokens` are then
/// only what the launch is planned for. A table turns the query of that token.
pub(super) fn decode_attention(
    query: CubeTensor,
    state: &CacheState<CubeBackend>,
    layout: CacheLayout,
    len: usize,
    tokens: usize,
    options: AttentionOptions,
    mut place: Place<'_>,
) -> (CubeTensor, CubeTensor) {
    let (shape, dtype) = (dims(&query), query.dtype);
    let rows = shape[1] / layout.shape().n_kv_heads * shape[2];
    let (float, scores) = (elem(&state.floats), options.scores(shape[3]));
    let problem = DecodeProblem { layout, len, tokens, rows, float, query: elem(&query), scores };
    let plan = match place.position {
        Some(_) => None,
        None => chunk_attention::plan(&problem, query.client.properties()),
    };
    // Chunks are read in vectors, and are f32 and turned already.
    let query = match plan {
        Some(_) => {
            let query = into_contiguous(CubeBackend::float_cast(query, FloatDType::F32));
            match place.rope.take() {
                Some(table) => apply_rope(query, table, tokens - 1),
                None => query,
            }
        }
        None => query,
    };
    let problem = DecodeProblem { query: elem(&query), ..problem };
    let query = into_contiguous(query);
    let output = shapes::attention(shape, layout.shape().head_dim.values);
    let output = empty_like(&query, output, query.dtype);
    let lse = empty_like(&query, shapes::log_sum_exp(shape), DType::F32);
    let bindings = DecodeBindings {
        query: arg(&query),
        cache: cache_bindings([&state.keys, &state.values, &state.floats], place),
        output: arg(&output),
        lse: &|| arg(&lse),
    };
    let client = &query.client;
    launched(match plan {
        Some(plan) => chunk_attention::launch_ref(client, bindings, &problem, &plan),
        None => decode_attention::launch_ref(client, bindings, &problem),
    });
    (CubeBackend::float_cast(output, dtype.into()), lse)
}

/// Checks that the device has enough cubes and wide enough indices for attention of a query of this
/// shape over `len` tokens.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported).
pub(in crate::backends) fn check_decode(
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

/// The rows of `x`, contiguous and f32, turned by `position`.
fn apply_rope(x: CubeTensor, table: &CubeTensor, position: usize) -> CubeTensor {
    let shape = dims(&x);
    let output = empty_like(&x, shape, DType::F32);
    let (client, n) = (&x.client, shape.iter().product());
    let binding = rotary_binding(table);
    launched(rope::launch_turn(client, arg(&x), arg(&output), binding, n, shape[3], position));
    output
}

/// Keys, values and float rows of a cache.
fn cache_bindings(
    [keys, values, floats]: [&CubeTensor; 3],
    Place { position, rope }: Place<'_>,
) -> CacheBindings {
    let [keys, values, floats] = [keys, values, floats].map(arg);
    let (position, rope) = (position.map(positions), rope.map(rotary_binding));
    CacheBindings { keys, values, floats, position, rope }
}

fn rotary_binding(table: &CubeTensor) -> RotaryBinding {
    let [positions, rotary_dim] = table.meta.shape().dims();
    RotaryBinding { table: arg(table), positions, rotary_dim }
}

/// Positions, and how many there are.
fn positions(tensor: &CubeTensor) -> (BufferArg, usize) {
    (arg(tensor), tensor.meta.shape().num_elements())
}

/// Copies each tensor of `state` that is not contiguous into a buffer of its own, because kernels
/// index buffers and know no strides.
pub(super) fn contiguous(state: CacheState<CubeBackend>) -> CacheState<CubeBackend> {
    let CacheState { keys, values, floats } = state;
    let [keys, values, floats] = [keys, values, floats].map(into_contiguous);
    CacheState { keys, values, floats }
}
