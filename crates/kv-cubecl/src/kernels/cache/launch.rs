use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
    prelude::*,
};

use super::kernel::{self, SourceLaunch, TokenArgsLaunch, TokenBlueprint};
use crate::{
    Result,
    kernels::{elementwise, quantize::RestoreProblem},
    layout::{CacheLayout, QuantSpec, QuantizedCounts},
};

pub(super) const F32: ElemType = ElemType::Float(FloatKind::F32);

/// A chunk being appended to a cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheProblem {
    /// The cache.
    pub(crate) layout: CacheLayout,
    /// Tokens in the cache before the chunk.
    pub(crate) len: usize,
    /// Tokens of the chunk.
    pub(crate) added: usize,
    /// Type of the float rows.
    pub(crate) float: ElemType,
}

impl CacheProblem {
    fn source(&self, first_row: usize, ring: usize) -> SourceLaunch {
        let layout = &self.layout;
        SourceLaunch::new(
            self.len,
            self.added,
            layout.window().sink_tokens,
            // A ring without slots is never read, but kernels divide by its length.
            ring.max(1),
            first_row,
            layout.float_rows(),
            layout.shape().head_dim,
        )
    }

    /// Elements of the longest buffer: the cache's float rows or the appended tokens. Packed words
    /// are fewer than the elements of the tokens that they hold.
    fn elements(&self) -> usize {
        let layout = &self.layout;
        let rows = layout.float_rows().max(layout.config().capacity).max(self.added);
        layout.slices() * rows * layout.shape().head_dim
    }

    fn keys(&self) -> SourceLaunch {
        self.source(0, self.layout.key_ring())
    }

    fn values(&self) -> SourceLaunch {
        self.source(self.layout.key_rows(), self.layout.value_ring())
    }

    /// How many keys and values were quantized before the chunk, and how many leave the window for
    /// it.
    fn leaving(&self) -> [QuantizedCounts; 2] {
        let window = self.layout.window();
        let (before, after) = (window.counts(self.len), window.counts(self.len + self.added));
        let [keys, values] = [after.keys - before.keys, after.values - before.values];
        [before, QuantizedCounts { keys, values }]
    }

    /// Whether keys leave the window, and whether values do, so that their words are written.
    pub(crate) fn flushes(&self) -> [bool; 2] {
        let [_, leaving] = self.leaving();
        [leaving.keys > 0, leaving.values > 0]
    }
}

/// The buffers of a cache.
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
pub(crate) struct CacheBindings {
    /// Packed keys.
    pub(crate) keys: BufferArg,
    /// Packed values.
    pub(crate) values: BufferArg,
    /// Float rows.
    pub(crate) floats: BufferArg,
    /// i32 `[1]`: how many tokens the cache holds, read by the kernel in place of
    /// [`CacheProblem::len`].
    pub(crate) position: Option<BufferArg>,
}

/// Appends one token, `key` and `value` f32 `[slices, head_dim]`, and quantizes what leaves the window
/// for it, in one launch. A full cache is left as it is.
pub(crate) fn launch_write_token(
    client: &Client,
    key: BufferArg,
    value: BufferArg,
    cache: CacheBindings,
    problem: &CacheProblem,
) -> Result<()> {
    let layout = &problem.layout;
    let (window, config) = (layout.window(), layout.config());
    let [key_bits, value_bits] = layout.code_bits();
    let blueprint = TokenBlueprint {
        group_size: config.group_size,
        key_bits,
        value_bits,
        saturating: problem.float != F32,
    };
    let (slices, head_dim) = (layout.slices(), layout.shape().head_dim);
    let leaving = match cache.position {
        Some(_) if window.keys => window.residual_length,
        Some(_) => 0,
        None => problem.leaving()[1].keys,
    };
    let key_groups = (leaving / config.group_size).max(1);
    let n_keys = slices * key_groups * head_dim;
    let n = n_keys + slices * (head_dim / blueprint.run());
    let grid = elementwise(client, "write", n, problem.elements())?;
    kernel::write_token::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        key,
        value,
        cache.floats,
        cache.keys,
        cache.values,
        cache.position.into(),
        TokenArgsLaunch::new(
            problem.keys(),
            problem.values(),
            window.args(),
            config.capacity,
            key_groups,
            layout.key_slice_words(),
            layout.value_slice_words(),
            n_keys,
            n,
        ),
        blueprint,
        problem.float,
    );
    Ok(())
}

/// Quantizes the groups of keys that leave the window into `words`.
///
/// `floats` are the cache's float rows, `chunk` the appended keys, f32
/// `[slices, added, head_dim]`.
pub(crate) fn launch_flush_keys(
    client: &Client,
    floats: BufferArg,
    chunk: BufferArg,
    words: BufferArg,
    problem: &CacheProblem,
    spec: QuantSpec,
) -> Result<()> {
    let layout = &problem.layout;
    let [before, leaving] = problem.leaving();
    let (first, groups) = (before.keys / spec.group_size, leaving.keys / spec.group_size);
    let n = layout.slices() * groups * layout.shape().head_dim;
    if n > 0 {
        let grid = elementwise(client, "write", n, problem.elements())?;
        kernel::flush_keys::launch(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
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
    Ok(())
}

/// Quantizes the values that leave the window into `words`; see [`launch_flush_keys`].
pub(crate) fn launch_flush_values(
    client: &Client,
    floats: BufferArg,
    chunk: BufferArg,
    words: BufferArg,
    problem: &CacheProblem,
    spec: QuantSpec,
) -> Result<()> {
    let layout = &problem.layout;
    let [before, leaving] = problem.leaving();
    let (first, tokens) = (before.values, leaving.values);
    let n = layout.slices() * tokens * (layout.shape().head_dim / spec.group_size);
    if n > 0 {
        let grid = elementwise(client, "write", n, problem.elements())?;
        kernel::flush_values::launch(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
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
    Ok(())
}

/// Stores the rows of `key` and `value`, f32 `[slices, added, head_dim]`, that stay in float.
pub(crate) fn launch_append(
    client: &Client,
    key: BufferArg,
    value: BufferArg,
    floats: [BufferArg; 2],
    problem: &CacheProblem,
) -> Result<()> {
    let layout = &problem.layout;
    let (window, end) = (layout.window(), problem.len + problem.added);
    let n = layout.slices() * problem.added * layout.shape().head_dim;
    let sides = [
        (key, problem.keys(), window.first_float_key(end)),
        (value, problem.values(), window.first_float_value(end)),
    ];
    for ((chunk, source, first_float), floats) in sides.into_iter().zip(floats) {
        let grid = elementwise(client, "write", n, problem.elements())?;
        kernel::append::launch(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            chunk,
            floats,
            source,
            n,
            first_float,
            problem.float != F32,
            problem.float,
        );
    }
    Ok(())
}

/// A whole tensor as a chunk that is appended to an empty cache and flushed at once.
fn whole(problem: &RestoreProblem) -> SourceLaunch {
    SourceLaunch::new(0, problem.tokens, 0, 1, 0, 1, problem.head_dim)
}

/// Stands for the float rows of an empty cache: never read, but a binding must not be empty.
fn no_floats(client: &Client) -> BufferArg {
    // SAFETY: the buffer is allocated with this length.
    unsafe { BufferArg::from_raw_parts(client.empty(size_of::<f32>()), 1) }
}

/// Quantizes `input`, f32 `[slices, tokens, head_dim]`, per channel into `words`.
pub(crate) fn launch_quantize_keys(
    client: &Client,
    input: BufferArg,
    words: BufferArg,
    problem: &RestoreProblem,
) -> Result<()> {
    let RestoreProblem { slices, tokens, head_dim, spec } = *problem;
    let groups = tokens / spec.group_size;
    let n = slices * groups * head_dim;
    let grid = elementwise(client, "quantize", n, problem.elements())?;
    kernel::flush_keys::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
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
    Ok(())
}

/// Quantizes `input`, f32 `[slices, tokens, head_dim]`, per token into `words`.
pub(crate) fn launch_quantize_values(
    client: &Client,
    input: BufferArg,
    words: BufferArg,
    problem: &RestoreProblem,
) -> Result<()> {
    let RestoreProblem { slices, tokens, head_dim, spec } = *problem;
    let n = slices * tokens * (head_dim / spec.group_size);
    let grid = elementwise(client, "quantize", n, problem.elements())?;
    kernel::flush_values::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
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
    Ok(())
}
