//! Attention of the heads of a token to recent tokens and entries, in one softmax.

pub(super) mod args;
pub(super) mod kernel;
pub(super) mod merge;

use cubecl::{client::Client, prelude::*};

use self::{
    args::{AttendArgsLaunch, AttendBlueprint, InputsLaunch},
    kernel::attend_rows,
    merge::{MergeArgsLaunch, merge_parts},
};
use crate::{
    Result,
    kernels::{
        Grid, Limits,
        head_rows::{HEADS, UNITS, WIDEST},
    },
    sparse::AttendPlan,
};

/// Cubes that a launch should have to use a whole device, if rows are enough.
const CUBES: usize = 512;
/// The fewest rows for which a part of them has its own cube.
const LEAST_ROWS: usize = 128;

/// The buffers of a launch.
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
pub(crate) struct AttendBindings {
    pub(crate) query: BufferArg,
    pub(crate) window: BufferArg,
    pub(crate) codes: BufferArg,
    pub(crate) floats: BufferArg,
    pub(crate) selected: BufferArg,
    pub(crate) sink_logits: BufferArg,
    pub(crate) span: BufferArg,
    /// `[batch, heads, tokens, width]`, or as [`launch_merge`] reads it if there are several parts.
    pub(crate) output: BufferArg,
}

/// Sizes of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttendProblem {
    /// The shape of queries, `[batch, heads, tokens, width]`.
    shape: [usize; 4],
    /// Entries that each token selects.
    top_k: usize,
    /// Equal parts of the rows of a token, each with its own cubes.
    parts: usize,
}

impl AttendProblem {
    /// Plans a launch. A call of few tokens has several cubes for the rows of each.
    pub(crate) fn new(shape: [usize; 4], top_k: usize, plan: &AttendPlan) -> Self {
        let [batch, heads, tokens, _] = shape;
        let entries = match (plan.compression, plan.selects) {
            (None, _) => 0,
            (Some(_), true) => top_k,
            (Some(_), false) => plan.entries.slots,
        };
        let most = (plan.sliding_window + entries).div_ceil(LEAST_ROWS).max(1);
        let cubes = (batch * tokens * heads.div_ceil(HEADS)).max(1);
        Self { shape, top_k, parts: (CUBES / cubes).clamp(1, most) }
    }

    /// Returns the shape of the sums over the parts, or `None` if there is one part.
    pub(crate) fn sums(&self) -> Option<[usize; 4]> {
        let [batch, heads, tokens, width] = self.shape;
        (self.parts > 1).then_some([batch, heads, tokens, self.parts * (width + 2)])
    }
}

/// Computes [`SparseOps::attend_rows`](crate::sparse::SparseOps::attend_rows), or the sums over the
/// parts of it.
pub(crate) fn launch_attend(
    client: &Client,
    bindings: AttendBindings,
    problem: AttendProblem,
    plan: &AttendPlan,
) -> Result<()> {
    let AttendProblem { shape: [batch, heads, tokens, width], top_k, parts } = problem;
    if width > WIDEST {
        let what = format!("sparse attention over rows of {width} channels");
        let why = format!("kernels have registers for at most {WIDEST}");
        return Err(crate::Error::Unsupported { what, why });
    }
    let AttendPlan { window, sliding_window, entries, compression, selects, scale, .. } = *plan;
    let cubes = batch * tokens * heads.div_ceil(HEADS) * parts;
    let results = batch * tokens * heads * parts * (width + 2);
    let elements =
        window.elements().max(entries.elements()).max(results).max(batch * tokens * top_k);
    let limits = Limits::of(client.properties());
    let grid = Grid::new("sparse attention", [cubes.max(1), 1, 1], UNITS, elements, &limits)?;
    let blueprint = AttendBlueprint {
        width,
        compresses: compression.is_some(),
        selects,
        partial: parts > 1,
        spec: entries.code_spec(),
    };
    let args = AttendArgsLaunch::new(
        batch,
        heads,
        tokens,
        parts,
        top_k,
        compression.map_or(1, |compression| compression.ratio),
        sliding_window,
        scale,
        window.args(),
        entries.args(),
    );
    attend_rows::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        InputsLaunch::new(
            bindings.query,
            bindings.window,
            bindings.codes,
            bindings.floats,
            bindings.selected,
            bindings.sink_logits,
            bindings.span,
        ),
        bindings.output,
        args,
        blueprint,
        window.format.float.elem(),
        entries.format.float.elem(),
    );
    Ok(())
}

/// Computes outputs from the sums over the parts of rows.
pub(crate) fn launch_merge(
    client: &Client,
    [sums, sink_logits, output]: [BufferArg; 3],
    problem: AttendProblem,
) -> Result<()> {
    let AttendProblem { shape: [batch, heads, tokens, width], parts, .. } = problem;
    let rows = batch * heads * tokens;
    let limits = Limits::of(client.properties());
    let elements = rows * parts * (width + 2);
    let grid = Grid::new("sparse attention", [rows.max(1), 1, 1], UNITS, elements, &limits)?;
    merge_parts::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        sums,
        sink_logits,
        output,
        MergeArgsLaunch::new(batch, heads, tokens, parts, width),
    );
    Ok(())
}
