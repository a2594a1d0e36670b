//! Attention over a cache whose values are the first channels of its keys, as in latent attention.
//!
//! A cube reads each row of its tokens once, for the scores and the sums of [`HEADS`] query rows.
//! With more query rows, several cubes read the same tokens. The tokens are split over cubes, too;
//! `decode_attention` merges the splits.
//!
//! **Supported**: up to 1024 channels; every format without a Hadamard transform; f32 and f16 float
//! rows; sliding windows, soft caps, positions on the device. Chunks take this kernel, too, and so
//! read the cache once for every [`HEADS`] query rows.

mod kernel;
#[cfg(all(test, feature = "cuda-source"))]
mod tests;

use cubecl::{client::Client, ir::DeviceProperties};

use self::kernel::SharedBlueprint;
use super::{
    Grid, Limits,
    decode_attention::{
        DecodeBindings, DecodeProblem, Hardware, args, grid, launch_merge, partial_results,
    },
    head_rows::{HEADS, UNITS, WIDEST},
    layout::positions_arg,
    rope::rope_arg,
};
use crate::{Error, Result, layout::CacheLayout};

/// Units that a streaming multiprocessor runs at once: an estimate, not measured.
const UNITS_PER_MULTIPROCESSOR: usize = 1024;

/// Fewest tokens of a split.
const LEAST_TOKENS: usize = 64;

/// Checks that a cache of this layout can be attended to on any device.
///
/// # Errors
/// [`Error::Unsupported`].
pub(crate) fn check(layout: &CacheLayout) -> Result<()> {
    let width = layout.shape().head_dim.keys;
    match width > WIDEST {
        true => Err(Error::Unsupported {
            what: format!("attention over rows of {width} channels"),
            why: format!("kernels have registers for at most {WIDEST}"),
        }),
        false => Ok(()),
    }
}

/// Checks that the device has enough cubes and wide enough indices for [`launch`] of this problem.
///
/// # Errors
/// Fails as [`launch`] does.
pub(crate) fn check_size(problem: &DecodeProblem, properties: &DeviceProperties) -> Result<()> {
    plan(problem, properties).map(drop)
}

/// Plans a launch: its grid, and the number of splits.
fn plan(problem: &DecodeProblem, properties: &DeviceProperties) -> Result<(Grid, usize)> {
    let row_chunks = problem.rows.div_ceil(HEADS);
    let at_once = UNITS_PER_MULTIPROCESSOR * Hardware::of(properties).n_multiprocessors / UNITS;
    let wanted = at_once / (problem.layout.slices() * row_chunks);
    let n_splits = wanted.clamp(1, problem.tokens.div_ceil(LEAST_TOKENS).max(1));
    let grid = grid(problem, n_splits, row_chunks, UNITS, &Limits::of(properties))?;
    Ok((grid, n_splits))
}

/// Attention of `problem`, whose query comes after rope, in two launches.
///
/// # Errors
/// [`Error::Unsupported`] where the device has too few cubes or too narrow indices.
pub(crate) fn launch(
    client: &Client,
    bindings: DecodeBindings<'_>,
    problem: &DecodeProblem,
) -> Result<()> {
    let layout = &problem.layout;
    let (grid, n_splits) = plan(problem, client.properties())?;
    if bindings.cache.position.is_none() {
        let bytes = problem.rows.div_ceil(HEADS) * layout.bytes_read(problem.tokens);
        tracing::trace!(target: crate::READ, kernel = "shared_attention", bytes);
    }
    let partials = partial_results(client, problem, n_splits);
    let positions = positions_arg(bindings.cache.position, layout);
    kernel::partial_attention::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        bindings.query,
        bindings.cache.keys,
        bindings.cache.floats,
        partials(),
        args(problem, n_splits, positions, rope_arg(None)),
        SharedBlueprint {
            head_dim: layout.shape().head_dim,
            spec: layout.specs().keys,
            window: layout.schedule().sliding_window.is_some(),
            softcap: problem.scores.softcap.is_some(),
            flat: grid.flat,
        },
        problem.float,
        problem.query,
    );
    launch_merge(client, partials(), bindings.output, (bindings.lse)(), problem, n_splits)
}
