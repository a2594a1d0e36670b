use cubecl::{client::Client, prelude::*};

use super::{
    base::ChunkPlan,
    kernel::{self, TilesLaunch},
};
use crate::kernels::{
    decode_attention::{DecodeBindings, DecodeProblem, args, launch_merge, partial_results},
    row_blocks::VECTOR,
};

/// Attends as planned, of a cache whose length is known; two launches.
pub fn launch_ref(
    client: &Client,
    bindings: DecodeBindings,
    problem: &DecodeProblem,
    plan: &ChunkPlan,
) {
    let ChunkPlan { blueprint, n_splits, .. } = *plan;
    let partials = partial_results(client, problem, n_splits);
    let count =
        CubeCount::Static(problem.layout.slices() as u32, n_splits as u32, plan.row_chunks as u32);
    // SAFETY: every index is below the length of its buffer, which the layout gives: tokens are below
    // the cache's length, rows and channels below theirs.
    unsafe {
        kernel::partial_attention::launch_unchecked(
            client,
            count,
            CubeDim::new_1d(blueprint.blocks.units as u32),
            VECTOR,
            bindings.query,
            bindings.keys,
            bindings.values,
            bindings.floats,
            partials(),
            args(problem, n_splits),
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
    launch_merge(client, partials(), bindings.output, bindings.lse, problem, n_splits);
}
