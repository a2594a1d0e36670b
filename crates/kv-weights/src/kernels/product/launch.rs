use cubecl::{client::Client, prelude::*};

use super::{
    base::{Hardware, ProductProblem, prepare},
    kernel::{self, ExtrasLaunch, OtherPartsLaunch, ProductArgsLaunch},
};
use crate::{
    ExpertSelection, PackedLayout, Result,
    formats::cube::{BlocksInKernels, SPAN},
    kernels::{grid, report_read},
};

/// Buffers of a launch, all contiguous.
#[allow(missing_debug_implementations, reason = "buffer arguments do not implement it")]
pub(crate) struct ProductBindings {
    /// Activations, f32 `[n, columns]`.
    pub(crate) x: BufferArg,
    /// The blocks of each part.
    pub(crate) words: Vec<BufferArg>,
    /// Gains of the norm, f32 `[columns]`.
    pub(crate) norm: Option<BufferArg>,
    /// Bias, f32, one number per row of weights.
    pub(crate) bias: Option<BufferArg>,
    /// Added to the output, of the same shape.
    pub(crate) residual: Option<BufferArg>,
    /// Output, f32 `[n, outputs]`.
    pub(crate) out: BufferArg,
}

/// Launches the product of `problem`.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) as listed in [the module](super).
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
    let grid = grid(client, "project", cubes * chunks, blueprint.units, most)?;
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
    let rows: usize = problem.parts.iter().map(|part| part.rows()).sum();
    let gains = usize::from(problem.norm) * layout.columns();
    let floats = gains + usize::from(bindings.bias.is_some()) * rows;
    let blocks: usize = problem.parts.iter().map(|part| part.bytes()).sum();
    report_read("product", chunks * (blocks + size_of::<f32>() * floats));
    let mut words = bindings.words.into_iter();
    let Some(first) = words.next() else { return Ok(()) };
    let others = OtherPartsLaunch::new(words.next().into(), words.next().into());
    let extras =
        ExtrasLaunch::new(bindings.norm.into(), bindings.bias.into(), bindings.residual.into());
    // SAFETY: the layouts give the lengths of all buffers. Rows and spans are within the layouts,
    // and the last word read is the one that holds the last byte of a block.
    unsafe {
        kernel::product::launch_unchecked::<F>(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            bindings.x,
            first,
            others,
            extras,
            bindings.out,
            args,
            blueprint,
        );
    }
    Ok(())
}

/// Launches the product with the picked expert for each of `n` picks.
///
/// The buffers are `x`, the blocks of all experts, the picks, i32 `[n]`, and the output, f32
/// `[n, rows]`. `bytes` is the size of all experts.
///
/// # Errors
/// The same as for [`launch`].
pub(crate) fn launch_picked<F: BlocksInKernels>(
    client: &Client,
    [x, words, picked, out]: [BufferArg; 4],
    layout: PackedLayout,
    picks: ExpertSelection,
    [n, bytes]: [usize; 2],
    hardware: Hardware,
) -> Result<()> {
    // A cube handles one pick, since the next may have another expert.
    let problem = ProductProblem::plain(1, layout);
    let blueprint = prepare(&problem, hardware);
    let cubes = layout.rows().div_ceil(blueprint.cube_rows());
    let most = bytes.max(n * layout.columns()).max(n * layout.rows());
    let grid = grid(client, "project_picked", cubes * n, blueprint.units, most)?;
    let (spans, row_bytes) = (layout.columns() / SPAN, layout.row_bytes());
    let rows = layout.rows();
    let args = ProductArgsLaunch::new(n, spans, row_bytes, rows, rows, 0, cubes, cubes, 0, 0.0);
    report_read("picked_product", n * layout.bytes());
    // SAFETY: picks are numbers of experts. Rows and spans are within the layouts, and the last
    // word read is the one that holds the last byte of a block.
    unsafe {
        kernel::picked_product::launch_unchecked::<F>(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            x,
            words,
            picked,
            out,
            args,
            picks.stride,
            picks.shared,
            blueprint,
        );
    }
    Ok(())
}
