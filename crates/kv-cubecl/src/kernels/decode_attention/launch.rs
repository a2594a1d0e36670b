use cubecl::{client::Client, prelude::*};

use super::{
    args::args,
    base::{DecodeProblem, Hardware, prepare},
    kernel,
};
use crate::{Result, kernels::elementwise};

/// The buffers of a launch, all contiguous.
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
pub struct DecodeBindings {
    /// f32 `[slices, rows, head_dim]`.
    pub query: BufferArg,
    /// Packed keys of the cache.
    pub keys: BufferArg,
    /// Packed values of the cache.
    pub values: BufferArg,
    /// Float rows of the cache.
    pub floats: BufferArg,
    /// f32 `[slices, rows, head_dim]`.
    pub output: BufferArg,
    /// f32 `[slices, rows]`.
    pub lse: BufferArg,
    /// i32 `[1]`: the position of the cache's last token, from which the kernel takes how many there
    /// are. The problem's lengths are then only what is planned for. Past the capacity counts as the
    /// last position.
    pub position: Option<BufferArg>,
}

/// Attends; two launches.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported), see [the module](super).
pub fn launch_ref(
    client: &Client,
    bindings: DecodeBindings,
    problem: &DecodeProblem,
) -> Result<()> {
    let (blueprint, settings) = prepare(problem, Hardware::of(client.properties()))?;
    let partials = partial_results(client, problem, settings.n_splits);
    let count = CubeCount::Static(
        problem.layout.slices() as u32,
        settings.n_splits as u32,
        settings.row_chunks as u32,
    );
    // SAFETY: every index is below the length of its buffer, which the layout gives: tokens are below
    // the cache's length, rows and channels below theirs.
    unsafe {
        kernel::partial_attention::launch_unchecked(
            client,
            count,
            CubeDim::new_1d(blueprint.units as u32),
            blueprint.vector,
            bindings.query,
            bindings.keys,
            bindings.values,
            bindings.floats,
            partials(),
            bindings.position.into(),
            args(problem, settings.n_splits),
            blueprint,
            problem.float,
        );
    }
    launch_merge(client, partials(), bindings.output, bindings.lse, problem, settings.n_splits);
    Ok(())
}

/// Allocates f32 `[slices, rows, n_splits, head_dim + 2]`: `(o, m, l)` of every split.
pub(crate) fn partial_results(
    client: &Client,
    problem: &DecodeProblem,
    n_splits: usize,
) -> impl Fn() -> BufferArg {
    let rows = problem.layout.slices() * problem.rows;
    let len = rows * n_splits * (problem.layout.shape().head_dim + 2);
    let partials = client.empty(len * size_of::<f32>());
    // SAFETY: the buffer was allocated with this length just above.
    move || unsafe { BufferArg::from_raw_parts(partials.clone(), len) }
}

/// Merges the splits of each row.
pub(crate) fn launch_merge(
    client: &Client,
    partials: BufferArg,
    output: BufferArg,
    lse: BufferArg,
    problem: &DecodeProblem,
    n_splits: usize,
) {
    let head_dim = problem.layout.shape().head_dim;
    let n = problem.layout.slices() * problem.rows * head_dim;
    let (count, dim) = elementwise(n);
    kernel::merge_partials::launch(
        client, count, dim, partials, output, lse, n, n_splits, head_dim,
    );
}
