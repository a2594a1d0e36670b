use cubecl::{client::Client, ir::DeviceProperties, prelude::*};

use super::{
    args::{CacheBuffersLaunch, args},
    base::{DecodeBlueprint, DecodeProblem, Hardware, MAX_HEAD_DIM, Settings, prepare},
    kernel,
};
use crate::{
    Result,
    kernels::{Grid, Limits, cache::CacheBindings, layout::positions_arg, rope::rope_arg},
};

/// The buffers of a launch, all contiguous.
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
pub(crate) struct DecodeBindings<'a> {
    /// `[slices, rows, head_dim]` of the problem's type, with the head_dim of keys, before the
    /// Hadamard transform of keys.
    pub(crate) query: BufferArg,
    /// The cache. With a position, that of the last token, the problem's lengths are only what is
    /// planned for; past the capacity counts as the last.
    pub(crate) cache: CacheBindings,
    /// As `query`, with the head_dim of values; the Hadamard transform of values is undone.
    pub(crate) output: BufferArg,
    /// f32 `[slices, rows]`.
    pub(crate) lse: &'a dyn Fn() -> BufferArg,
}

/// Checks that the device has enough cubes and wide enough indices for [`launch_ref`] of this
/// problem.
///
/// # Errors
/// Fails as [`launch_ref`] does.
pub(crate) fn check_size(problem: &DecodeProblem, properties: &DeviceProperties) -> Result<()> {
    let (blueprint, settings) = prepare(problem, Hardware::of(properties))?;
    let Settings { n_splits, row_chunks } = settings;
    grid(problem, n_splits, row_chunks, blueprint.units, &Limits::of(properties)).map(drop)
}

/// Attention of `problem`, in one launch, or in two where tokens are split over cubes: partial
/// results of the splits, and their merge.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported), see [the module](super).
pub(crate) fn launch_ref(
    client: &Client,
    bindings: DecodeBindings<'_>,
    problem: &DecodeProblem,
) -> Result<()> {
    let properties = client.properties();
    let (blueprint, settings) = prepare(problem, Hardware::of(properties))?;
    let Settings { n_splits, row_chunks } = settings;
    let limits = Limits::of(properties);
    let grid = grid(problem, n_splits, row_chunks, blueprint.units, &limits)?;
    let blueprint = DecodeBlueprint { flat: grid.flat, ..blueprint };
    let DecodeBindings { output, lse, .. } = bindings;
    let (results, merged) = match blueprint.whole {
        true => (output, None),
        false => {
            let partials = partial_results(client, problem, n_splits);
            (partials(), Some((partials(), output)))
        }
    };
    if bindings.cache.position.is_none() {
        let bytes = row_chunks * problem.layout.bytes_read(problem.tokens);
        tracing::trace!(target: crate::READ, kernel = "decode_attention", bytes);
    }
    let positions = positions_arg(bindings.cache.position, &problem.layout);
    let args = args(problem, n_splits, positions, rope_arg(bindings.cache.rope));
    // SAFETY: every index is below the length of its buffer, which the layout gives: tokens are
    // below the cache's length, rows and channels below theirs.
    unsafe {
        kernel::partial_attention::launch_unchecked(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            blueprint.vector,
            bindings.query,
            CacheBuffersLaunch::new(
                bindings.cache.keys,
                bindings.cache.values,
                bindings.cache.floats,
            ),
            results,
            lse(),
            args,
            blueprint,
            problem.float,
            problem.query,
        );
    }
    match merged {
        None => Ok(()),
        Some((partials, output)) => {
            launch_merge(client, partials, output, lse(), problem, n_splits)
        }
    }
}

fn partial_elements(problem: &DecodeProblem, n_splits: usize) -> usize {
    let rows = problem.layout.slices() * problem.rows;
    rows * n_splits * (problem.layout.shape().head_dim.values + 2)
}

/// The grid of a launch over slices, splits and chunks of rows.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) where the device has too few cubes or too
/// narrow indices for it or for the merge that follows.
pub(crate) fn grid(
    problem: &DecodeProblem,
    n_splits: usize,
    row_chunks: usize,
    units: usize,
    limits: &Limits,
) -> Result<Grid> {
    let layout = &problem.layout;
    let elements = layout.slices() * layout.slice_elements();
    let elements = elements.max(partial_elements(problem, n_splits));
    Grid::elementwise("attention over a cache", elements, elements, limits)?;
    let (merged, units_of_merge) = merge_size(problem);
    Grid::new("attention over a cache", merged, units_of_merge, elements, limits)?;
    let wanted = [layout.slices(), n_splits, row_chunks];
    Ok(Grid::new("attention over a cache", wanted, units, elements, limits)?)
}

/// Allocates f32 `[slices, rows, n_splits, head_dim + 2]`, with the head_dim of values: `(o, m, l)`
/// of every split.
pub(crate) fn partial_results(
    client: &Client,
    problem: &DecodeProblem,
    n_splits: usize,
) -> impl Fn() -> BufferArg {
    let len = partial_elements(problem, n_splits);
    let partials = client.empty(len * size_of::<f32>());
    // SAFETY: the buffer was allocated with this length just above.
    move || unsafe { BufferArg::from_raw_parts(partials.clone(), len) }
}

/// Merges the splits of each row, and undoes the Hadamard transform of values.
pub(crate) fn launch_merge(
    client: &Client,
    partials: BufferArg,
    output: BufferArg,
    lse: BufferArg,
    problem: &DecodeProblem,
    n_splits: usize,
) -> Result<()> {
    let head_dim = problem.layout.shape().head_dim.values;
    let rows = problem.layout.slices() * problem.rows;
    let ((wanted, units), elements) = (merge_size(problem), partial_elements(problem, n_splits));
    let limits = Limits::of(client.properties());
    let grid = Grid::new("decode_attention", wanted, units, elements, &limits)?;
    kernel::merge_partials::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        partials,
        output,
        lse,
        rows,
        n_splits,
        head_dim,
        units,
        problem.layout.config().uses_hadamard_values(),
        problem.query,
    );
    Ok(())
}

/// Cubes that merge the rows of `problem`, and the units of each.
fn merge_size(problem: &DecodeProblem) -> ([usize; 3], usize) {
    let head_dim = problem.layout.shape().head_dim.values;
    let units = merge_units(head_dim);
    ([problem.layout.slices() * problem.rows * head_dim.div_ceil(units), 1, 1], units)
}

/// Units of a cube that merges a row of `head_dim` channels, or a part of it.
pub(super) fn merge_units(head_dim: usize) -> usize {
    head_dim.next_power_of_two().clamp(32, MAX_HEAD_DIM)
}
