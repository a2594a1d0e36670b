//! Launches that write a cache and attend to it.

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

use super::tensors::{arg, dims, elem, empty_like, launched, writable};
use crate::{
    AttentionOptions, CacheState, Result,
    kernels::{
        cache::{self, BlockSource, CacheBindings, CacheProblem},
        chunk_attention,
        decode_attention::{self, DecodeBindings, DecodeProblem},
        hadamard::{HadamardBindings, RopeBefore, launch_hadamard, launch_hadamard_keys_values},
        rope::{self, RopeBinding},
        shared_attention,
    },
    layout::{CacheLayout, QuantSpec, Side, Sides},
    scores::Scores,
    shapes,
};

/// Device position and rope table of one token.
#[derive(Clone, Copy, Default)]
pub(super) struct StepTensors<'a> {
    /// Contiguous, as [`TokenPosition::Stored`](crate::TokenPosition::Stored).
    pub(super) position: Option<&'a CubeTensor>,
    /// Contiguous, as [`TokenRope::Table`](crate::TokenRope::Table).
    pub(super) rope: Option<&'a CubeTensor>,
}

impl StepTensors<'_> {
    /// Takes the rope for rows that get the Hadamard transform after it, at `position` unless the
    /// device holds another. The kernels that follow then apply none.
    fn take_rope(&mut self, position: usize) -> RopeBefore {
        let rope = self.rope.take();
        let positions = rope.and(self.position).map(positions);
        RopeBefore { rope: rope.map(rope_binding), position, positions }
    }
}

/// Appends `key` and `value` to a cache of `len` tokens. With a device position, the kernel reads
/// the length from it, and `len` only plans the launch. A rope table applies to the key of a single
/// token.
pub(super) fn write(
    state: CacheState<CubeBackend>,
    key: CubeTensor,
    value: CubeTensor,
    layout: CacheLayout,
    len: usize,
    mut step: StepTensors<'_>,
) -> CacheState<CubeBackend> {
    let CacheState { mut keys, mut values, floats } = contiguous(state);
    let floats = writable(floats);
    let [key, value] = stored([key, value].map(into_contiguous), &layout, len, &mut step);
    let problem = CacheProblem { layout, len, added: dims(&key)[2], float: elem(&floats) };
    let flushes = match step.position {
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
    // All sides, before rows are written over that they read.
    let sides = [(Side::Keys, &key, &keys), (Side::Values, &value, &values)];
    let sides = &sides[..layout.stored_sides().len()];
    let read_twice =
        |side| layout.sides()[side].spec.is_some_and(|spec: QuantSpec| spec.reads_twice());
    for &(side, chunk, words) in sides.iter().filter(|(side, ..)| read_twice(*side)) {
        if flushes[side] {
            let rope = step.rope.filter(|_| side == Side::Keys).map(rope_binding);
            let (floats, chunk_elem) = (arg(&floats), elem(chunk));
            let source = BlockSource { floats, chunk: arg(chunk), chunk_elem, rope };
            let positions = || step.position.map(positions);
            let words = arg(words);
            launched(cache::launch_flush_blocks(client, source, words, &positions, &problem, side));
        }
    }
    if problem.added == 1 {
        let bindings = cache_bindings([&keys, &values, &floats], step);
        let (chunk, key, value) = (elem(&key), arg(&key), arg(&value));
        launched(cache::launch_write_token(client, key, value, bindings, chunk, &problem));
    } else {
        for &(side, chunk, words) in sides.iter().filter(|(side, ..)| !read_twice(*side)) {
            let (floats, chunk, words) = (arg(&floats), arg(chunk), arg(words));
            launched(cache::launch_flush(client, floats, chunk, words, &problem, side));
        }
        for &(side, chunk, _) in sides {
            launched(cache::launch_append(client, arg(chunk), arg(&floats), &problem, side));
        }
    }
    CacheState { keys, values, floats }
}

/// Attends to the first `tokens` of a cache of `len` tokens, whose tensors are contiguous. With a
/// device position, the kernel reads the last token's position from it, and `len` and `tokens` only
/// plan the launch. A rope table applies to the query of that token.
pub(super) fn decode_attention(
    query: CubeTensor,
    state: &CacheState<CubeBackend>,
    layout: CacheLayout,
    len: usize,
    tokens: usize,
    options: AttentionOptions,
    mut step: StepTensors<'_>,
) -> (CubeTensor, CubeTensor) {
    let (shape, dtype) = (dims(&query), query.dtype);
    let rows = shape[1] / layout.shape().n_kv_heads * shape[2];
    let (float, scores) = (elem(&state.floats), options.scores(shape[3]));
    let problem = DecodeProblem { layout, len, tokens, rows, float, query: elem(&query), scores };
    let shared = layout.shape().shares_values;
    let plan = match step.position {
        _ if shared => None,
        Some(_) => None,
        None => chunk_attention::plan(&problem, query.client.properties()),
    };
    let query = match plan {
        // The chunk kernel reads vectors of f32, after rope and the Hadamard transform.
        Some(_) if layout.config().uses_hadamard_keys() => {
            hadamard(into_contiguous(query), step.take_rope(tokens - 1))
        }
        Some(_) => {
            let query = into_contiguous(CubeBackend::float_cast(query, FloatDType::F32));
            match step.rope.take() {
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
        cache: cache_bindings([&state.keys, &state.values, &state.floats], step),
        output: arg(&output),
        lse: &|| arg(&lse),
    };
    let client = &query.client;
    launched(match plan {
        None if shared => shared_attention::launch(client, bindings, &problem),
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
    if layout.shape().shares_values {
        return shared_attention::check_size(&problem, properties);
    }
    match chunk_attention::plan(&problem, properties) {
        Some(plan) => chunk_attention::grid_of(&problem, &plan, properties).map(drop),
        None => decode_attention::check_size(&problem, properties),
    }
}

/// Returns key and value as a cache of `len` tokens stores them: unchanged, or in f32 where a side
/// is stored after the Hadamard transform.
fn stored(
    [key, value]: [CubeTensor; 2],
    layout: &CacheLayout,
    len: usize,
    step: &mut StepTensors<'_>,
) -> [CubeTensor; 2] {
    let as_f32 = |rows| into_contiguous(CubeBackend::float_cast(rows, FloatDType::F32));
    match Sides::from_fn(|side| layout.config().uses_hadamard(side)) {
        Sides { keys: false, values: false } => [key, value],
        Sides { keys: true, values: false } => [hadamard(key, step.take_rope(len)), as_f32(value)],
        Sides { keys: false, values: true } => {
            [as_f32(key), hadamard(value, RopeBefore::default())]
        }
        Sides { keys: true, values: true } => {
            let outputs = [&key, &value].map(|rows| empty_like(rows, dims(rows), DType::F32));
            let rows = Sides {
                keys: hadamard_bindings(&key, &outputs[0], step.take_rope(len)),
                values: hadamard_bindings(&value, &outputs[1], RopeBefore::default()),
            };
            launched(launch_hadamard_keys_values(&key.client, rows, elem(&key)));
            outputs
        }
    }
}

/// The Hadamard transform of the rows of `x`, contiguous, after rope; f32.
pub(super) fn hadamard(x: CubeTensor, before: RopeBefore) -> CubeTensor {
    let output = empty_like(&x, dims(&x), DType::F32);
    let rows = hadamard_bindings(&x, &output, before);
    launched(launch_hadamard(&x.client, rows, elem(&x)));
    output
}

fn hadamard_bindings(
    input: &CubeTensor,
    output: &CubeTensor,
    before: RopeBefore,
) -> HadamardBindings {
    let (shape, input, output) = (dims(input), arg(input), arg(output));
    let n = shape.iter().product();
    HadamardBindings { input, output, n, head_dim: shape[3], before }
}

/// Applies rope by `position` to the rows of `x`, contiguous and f32.
fn apply_rope(x: CubeTensor, table: &CubeTensor, position: usize) -> CubeTensor {
    let shape = dims(&x);
    let output = empty_like(&x, shape, DType::F32);
    let (client, n) = (&x.client, shape.iter().product());
    let binding = rope_binding(table);
    launched(rope::launch_rope(client, arg(&x), arg(&output), binding, n, shape[3], position));
    output
}

/// Binds the tensors of a cache and the token's position.
fn cache_bindings(
    [keys, values, floats]: [&CubeTensor; 3],
    StepTensors { position, rope }: StepTensors<'_>,
) -> CacheBindings {
    let [keys, values, floats] = [keys, values, floats].map(arg);
    let (position, rope) = (position.map(positions), rope.map(rope_binding));
    CacheBindings { keys, values, floats, position, rope }
}

fn rope_binding(table: &CubeTensor) -> RopeBinding {
    let [positions, rotary_dim] = table.meta.shape().dims();
    RopeBinding { table: arg(table), positions, rotary_dim }
}

/// Binds positions with their number.
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
