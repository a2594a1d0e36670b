use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
    prelude::*,
};

use super::kernel::{self, SourceLaunch};
use crate::{
    kernels::{elementwise, quantize::RestoreProblem},
    layout::{CacheLayout, QuantSpec},
};

const F32: ElemType = ElemType::Float(FloatKind::F32);

/// A chunk being appended to a cache.
#[derive(Clone, Copy, Debug)]
pub struct CacheProblem {
    /// The cache.
    pub layout: CacheLayout,
    /// Tokens in the cache before the chunk.
    pub len: usize,
    /// Tokens of the chunk.
    pub added: usize,
    /// Type of the float rows.
    pub float: ElemType,
}

impl CacheProblem {
    fn source(&self, first_row: usize, ring: usize) -> SourceLaunch {
        let layout = &self.layout;
        SourceLaunch::new(
            self.len,
            self.added,
            layout.window().sink_tokens,
            // A ring without slots is never read, but its length divides.
            ring.max(1),
            first_row,
            layout.float_rows(),
            layout.shape().head_dim,
        )
    }

    fn keys(&self) -> SourceLaunch {
        self.source(0, self.layout.key_ring())
    }

    fn values(&self) -> SourceLaunch {
        self.source(self.layout.key_rows(), self.layout.value_ring())
    }
}

/// Quantizes the key groups that leave the window into `words`.
///
/// `floats` are the cache's float rows, `chunk` the appended keys, f32
/// `[slices, added, head_dim]`.
pub fn launch_flush_keys(
    client: &Client,
    floats: BufferArg,
    chunk: BufferArg,
    words: BufferArg,
    problem: &CacheProblem,
    spec: QuantSpec,
) {
    let layout = &problem.layout;
    let window = layout.window();
    let first = window.counts(problem.len).keys / spec.group_size;
    let groups = window.counts(problem.len + problem.added).keys / spec.group_size - first;
    let n = layout.slices() * groups * layout.shape().head_dim;
    if n > 0 {
        let (count, dim) = elementwise(n);
        kernel::flush_keys::launch(
            client,
            count,
            dim,
            floats,
            chunk,
            words,
            problem.keys(),
            n,
            first,
            groups,
            layout.key_slice_words(),
            spec.group_size,
            spec.n_bits,
            problem.float,
        );
    }
}

/// Quantizes the values that leave the window into `words`; see [`launch_flush_keys`].
pub fn launch_flush_values(
    client: &Client,
    floats: BufferArg,
    chunk: BufferArg,
    words: BufferArg,
    problem: &CacheProblem,
    spec: QuantSpec,
) {
    let layout = &problem.layout;
    let window = layout.window();
    let first = window.counts(problem.len).values;
    let tokens = window.counts(problem.len + problem.added).values - first;
    let n = layout.slices() * tokens * (layout.shape().head_dim / spec.group_size);
    if n > 0 {
        let (count, dim) = elementwise(n);
        kernel::flush_values::launch(
            client,
            count,
            dim,
            floats,
            chunk,
            words,
            problem.values(),
            n,
            first,
            tokens,
            layout.value_slice_words(),
            spec.group_size,
            spec.n_bits,
            problem.float,
        );
    }
}

/// Stores the rows of `key` and `value`, f32 `[slices, added, head_dim]`, that stay in float.
pub fn launch_append(
    client: &Client,
    key: BufferArg,
    value: BufferArg,
    floats: [BufferArg; 2],
    problem: &CacheProblem,
) {
    let layout = &problem.layout;
    let (window, end) = (layout.window(), problem.len + problem.added);
    let n = layout.slices() * problem.added * layout.shape().head_dim;
    let sides = [
        (key, problem.keys(), window.first_float_key(end)),
        (value, problem.values(), window.first_float_value(end)),
    ];
    for ((chunk, source, first_float), floats) in sides.into_iter().zip(floats) {
        let (count, dim) = elementwise(n);
        kernel::append::launch(
            client,
            count,
            dim,
            chunk,
            floats,
            source,
            n,
            first_float,
            problem.float != F32,
            problem.float,
        );
    }
}

/// A whole tensor as a chunk appended to nothing, all of which leaves the window.
fn whole(problem: &RestoreProblem) -> SourceLaunch {
    SourceLaunch::new(0, problem.tokens, 0, 1, 0, 1, problem.head_dim)
}

/// The float rows of a cache without any: never read, but a binding must not be empty.
fn no_floats(client: &Client) -> BufferArg {
    // SAFETY: the buffer is allocated with this length.
    unsafe { BufferArg::from_raw_parts(client.empty(size_of::<f32>()), 1) }
}

/// Quantizes `input`, f32 `[slices, tokens, head_dim]`, as keys.
pub fn launch_quantize_keys(
    client: &Client,
    input: BufferArg,
    words: BufferArg,
    problem: &RestoreProblem,
) {
    let RestoreProblem { slices, tokens, head_dim, spec } = *problem;
    let groups = tokens / spec.group_size;
    let n = slices * groups * head_dim;
    let (count, dim) = elementwise(n);
    kernel::flush_keys::launch(
        client,
        count,
        dim,
        no_floats(client),
        input,
        words,
        whole(problem),
        n,
        0,
        groups,
        spec.words(tokens, head_dim),
        spec.group_size,
        spec.n_bits,
        F32,
    );
}

/// Quantizes `input`, f32 `[slices, tokens, head_dim]`, as values.
pub fn launch_quantize_values(
    client: &Client,
    input: BufferArg,
    words: BufferArg,
    problem: &RestoreProblem,
) {
    let RestoreProblem { slices, tokens, head_dim, spec } = *problem;
    let n = slices * tokens * (head_dim / spec.group_size);
    let (count, dim) = elementwise(n);
    kernel::flush_values::launch(
        client,
        count,
        dim,
        no_floats(client),
        input,
        words,
        whole(problem),
        n,
        0,
        tokens,
        spec.words(tokens, head_dim),
        spec.group_size,
        spec.n_bits,
        F32,
    );
}
