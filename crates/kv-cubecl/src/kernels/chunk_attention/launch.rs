use cubecl::{client::Client, ir::DeviceProperties};

use super::{
    base::{ChunkBlueprint, ChunkPlan},
    kernel::{self, TilesLaunch},
};
use crate::{
    Result,
    kernels::{
        Grid, Limits,
        decode_attention::{
            CacheBuffersLaunch, DecodeBindings, DecodeProblem, args, grid, launch_merge,
            partial_results,
        },
        layout::positions_arg,
        rope::rope_arg,
        row_blocks::VECTOR,
    },
};

/// Attention as planned, over a cache whose length the host knows, in two launches. The query
/// must already be transformed if keys are stored transformed.
///
/// # Errors
/// Fails as [`grid_of`] does.
pub(crate) fn launch_ref(
    client: &Client,
    bindings: DecodeBindings<'_>,
    problem: &DecodeProblem,
    plan: &ChunkPlan,
) -> Result<()> {
    let n_splits = plan.n_splits;
    let grid = grid_of(problem, plan, client.properties())?;
    let blueprint = ChunkBlueprint { flat: grid.flat, ..plan.blueprint };
    let partials = partial_results(client, problem, n_splits);
    // SAFETY: every index is below the length of its buffer, which the layout gives: tokens are
    // below the cache's length, rows and channels below theirs.
    unsafe {
        kernel::partial_attention::launch_unchecked(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            VECTOR,
            bindings.query,
            CacheBuffersLaunch::new(
                bindings.cache.keys,
                bindings.cache.values,
                bindings.cache.floats,
            ),
            partials(),
            args(problem, n_splits, positions_arg(None, &problem.layout), rope_arg(None)),
            TilesLaunch::new(
                plan.main,
                plan.main_tiles,
                plan.sink_tiles,
                plan.n_tiles,
                plan.tiles_per_split,
            ),
            blueprint,
            problem.float,
        );
    }
    launch_merge(client, partials(), bindings.output, (bindings.lse)(), problem, n_splits)
}

/// The grid of the first launch of a plan.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) where the device has too few cubes or too
/// narrow indices.
pub(crate) fn grid_of(
    problem: &DecodeProblem,
    plan: &ChunkPlan,
    properties: &DeviceProperties,
) -> Result<Grid> {
    let units = plan.blueprint.blocks.units;
    grid(problem, plan.n_splits, plan.row_chunks, units, &Limits::of(properties))
}
