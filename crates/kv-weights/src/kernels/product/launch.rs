use cubecl::{client::Client, prelude::*};

use super::{
    base::{Hardware, ProductProblem, prepare},
    kernel::{self, ProductArgsLaunch},
};
use crate::{
    Result,
    formats::cube::{BlocksInKernels, SPAN},
    kernels::Grid,
};

/// The buffers of a launch, all contiguous.
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
pub(crate) struct ProductBindings {
    /// f32 `[n, columns]`.
    pub(crate) x: BufferArg,
    /// The blocks of each part.
    pub(crate) words: Vec<BufferArg>,
    /// Gains of the norm, f32 `[columns]`.
    pub(crate) norm: Option<BufferArg>,
    /// f32, one for each row of weights.
    pub(crate) bias: Option<BufferArg>,
    /// What is added to the output, of its shape.
    pub(crate) residual: Option<BufferArg>,
    /// f32 `[n, outputs]`.
    pub(crate) out: BufferArg,
}

/// The product of `problem`.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported), see [the module](super).
pub(crate) fn launch<F: BlocksInKernels>(
    client: &Client,
    bindings: ProductBindings,
    problem: &ProductProblem,
    hardware: Hardware,
) -> Result<()> {
    let blueprint = prepare(problem, hardware);
    let outputs = problem.part_outputs();
    let part = |i: usize| outputs.get(i).copied().unwrap_or(0);
    let part_cubes = |i: usize| part(i).div_ceil(blueprint.cube_rows());
    let cubes = part_cubes(0) + part_cubes(1) + part_cubes(2);
    let chunks = problem.n.div_ceil(blueprint.x_rows);
    let layout = &problem.parts[0];
    let most = problem.parts.iter().map(|part| part.bytes()).max().unwrap_or(0);
    let most = most.max(problem.n * layout.columns()).max(problem.n * problem.outputs());
    let grid = Grid::new("project", cubes * chunks, blueprint.units, most, client.properties())?;
    let args = ProductArgsLaunch::new(
        problem.n,
        layout.columns() / SPAN,
        layout.row_bytes(),
        problem.outputs(),
        part(0),
        part(1),
        cubes,
        part_cubes(0),
        part_cubes(1),
        problem.epsilon,
    );
    let mut words = bindings.words.into_iter();
    let Some(first) = words.next() else { return Ok(()) };
    // SAFETY: every index is below the length of its buffer, which the layouts give: rows and spans are below theirs,
    // and no word is read beyond the one that has the last byte of a block.
    unsafe {
        kernel::product::launch_unchecked::<F>(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            bindings.x,
            first,
            words.next().into(),
            words.next().into(),
            bindings.norm.into(),
            bindings.bias.into(),
            bindings.residual.into(),
            bindings.out,
            args,
            blueprint,
        );
    }
    Ok(())
}
