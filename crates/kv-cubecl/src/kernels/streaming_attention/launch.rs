use cubecl::{
    client::Client,
    ir::{DeviceProperties, ElemType},
    prelude::*,
};

use super::{
    backward::{self, GradientInputsLaunch},
    forward::{self, ForwardBlueprint},
    kernel::{self, InputsLaunch, ROWS, StreamArgsLaunch, StreamBlueprint},
};
use crate::{
    Result,
    kernels::{
        Grid, Limits,
        row_blocks::{Processor, RowBlocks, VECTOR},
    },
    layout::{SideSchedule, Sides, StreamSpec},
    scores::Scores,
};

/// Sizes of a call of streaming attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamProblem {
    /// Range of tokens and the visible ones of each row.
    pub(crate) spec: StreamSpec,
    /// (batch, kv head) pairs.
    pub(crate) slices: usize,
    /// Query heads per kv head.
    pub(crate) n_rep: usize,
    /// Query rows of a head.
    pub(crate) m: usize,
    /// Keys of a slice.
    pub(crate) n: usize,
    /// Channels of queries and keys, and of values; at most 256.
    pub(crate) head_dim: Sides<usize>,
    /// Scale and soft cap of the scores.
    pub(crate) scores: Scores,
}

impl StreamProblem {
    fn args(&self) -> StreamArgsLaunch {
        StreamArgsLaunch::new(
            self.m,
            self.n,
            self.heads(),
            self.n_rep,
            self.spec.first_query,
            self.spec.first_key,
            self.spec.schedule.args(),
            self.scores.scale,
            self.scores.softcap.unwrap_or(0.0),
        )
    }

    /// Returns whether a sliding window may hide tokens, and whether scores have a soft cap.
    fn features(&self) -> (bool, bool) {
        (self.spec.schedule.sliding_window.is_some(), self.scores.softcap.is_some())
    }

    fn heads(&self) -> usize {
        self.slices * self.n_rep
    }

    fn widest(&self) -> usize {
        self.head_dim.keys.max(self.head_dim.values)
    }

    /// Units per cube of the kernels that are not blocked.
    fn units(&self) -> usize {
        if self.widest() <= 64 { 64 } else { 128 }
    }

    fn blueprint(&self, grid: &Grid) -> StreamBlueprint {
        let (window, softcap) = self.features();
        let (head_dim, units) = (self.head_dim, self.units());
        StreamBlueprint { head_dim, units, flat: grid.flat, window, softcap }
    }

    /// At least the elements of the longest buffer: the query or the output, or `sides` tensors
    /// shaped like the keys or values, in one buffer.
    fn elements(&self, sides: usize) -> usize {
        self.widest() * (self.heads() * self.m).max(sides * self.slices * self.n)
    }

    /// Cubes of the forward pass.
    fn forward_grid(&self, blocks: Option<&RowBlocks>, limits: &Limits) -> Result<Grid> {
        let (rows, units) =
            blocks.map_or((ROWS, self.units()), |blocks| (blocks.rows, blocks.units));
        let wanted = [self.m.div_ceil(rows), self.heads(), 1];
        Ok(Grid::new("streaming_attention", wanted, units, self.elements(1), limits)?)
    }

    /// The grids of the backward pass: of the kernel for the query, and of that for keys and
    /// values.
    fn backward_grids(&self, limits: &Limits) -> Result<[Grid; 2]> {
        let grid = |wanted| {
            let (what, elements) = ("gradient of streaming_attention", self.elements(4));
            Grid::new(what, wanted, self.units(), elements, limits)
        };
        let key_cubes = self.n.div_ceil(backward::KEYS_PER_CUBE);
        Ok([grid([self.m.div_ceil(ROWS), self.heads(), 1])?, grid([key_cubes, self.slices, 1])?])
    }

    fn blocks(&self, properties: &DeviceProperties) -> Option<RowBlocks> {
        // The inputs are f32, not packed, so no groups limit the runs.
        RowBlocks::new(self.head_dim, 0, 0, Processor::of(properties))
    }

    /// Checks that the device has enough cubes and wide enough indices for the forward pass and,
    /// with `backward`, for the backward pass.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported).
    pub(crate) fn check(&self, backward: bool, properties: &DeviceProperties) -> Result<()> {
        let limits = Limits::of(properties);
        self.forward_grid(self.blocks(properties).as_ref(), &limits)?;
        if backward {
            self.backward_grids(&limits)?;
        }
        Ok(())
    }
}

/// Buffers of the forward pass, all contiguous; f32, but for query and output. Keys and queries
/// have one head_dim, values and outputs another.
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
pub(crate) struct ForwardBindings {
    /// `[slices, n_rep, m, head_dim]`.
    pub(crate) query: BufferArg,
    /// `[slices, n, head_dim]`.
    pub(crate) key: BufferArg,
    /// The fake-quantized keys, `[slices, n, head_dim]`.
    pub(crate) key_hat: BufferArg,
    /// `[slices, n, head_dim]`.
    pub(crate) value: BufferArg,
    /// The fake-quantized values, `[slices, n, head_dim]`.
    pub(crate) value_hat: BufferArg,
    /// `[slices, n_rep, m, head_dim]`, with the head_dim of values.
    pub(crate) output: BufferArg,
    /// `[slices, n_rep, m]`.
    pub(crate) lse: BufferArg,
}

/// The forward pass, one launch, of a query of this type, which is that of the output.
///
/// # Errors
/// Fails as [`StreamProblem::check`] does.
pub(crate) fn launch_forward(
    client: &Client,
    bindings: ForwardBindings,
    query_type: ElemType,
    problem: &StreamProblem,
) -> Result<()> {
    let blocks = problem.blocks(client.properties());
    let grid = problem.forward_grid(blocks.as_ref(), &Limits::of(client.properties()))?;
    if let Some(blocks) = blocks {
        let sides = problem.spec.schedule.sides.map(|side| side != SideSchedule::NEVER);
        let (flat, (window, softcap)) = (grid.flat, problem.features());
        let Sides { keys, values } = sides;
        let blueprint = ForwardBlueprint { blocks, flat, keys, values, window, softcap };
        // SAFETY: every index is below the length of its buffer: rows, tokens and channels are
        // below theirs.
        unsafe {
            forward::forward_blocked::launch_unchecked(
                client,
                grid.count(),
                grid.dim(),
                grid.address,
                VECTOR,
                InputsLaunch::new(
                    bindings.query,
                    bindings.key,
                    bindings.key_hat,
                    bindings.value,
                    bindings.value_hat,
                ),
                bindings.output,
                bindings.lse,
                problem.args(),
                blueprint,
                query_type,
            );
        }
        return Ok(());
    }
    kernel::forward::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        InputsLaunch::new(
            bindings.query,
            bindings.key,
            bindings.key_hat,
            bindings.value,
            bindings.value_hat,
        ),
        bindings.output,
        bindings.lse,
        problem.args(),
        problem.blueprint(&grid),
        query_type,
    );
    Ok(())
}

/// Buffers of the backward pass, all contiguous f32.
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
pub(crate) struct BackwardBindings<F: Fn() -> [BufferArg; 5]> {
    /// Returns the inputs, which two kernels read: query `[slices, n_rep, m, head_dim]`; keys and
    /// values `[2, slices, n, head_dim]`, floats then restored form; gradient of the output; stats
    /// `[2, slices * n_rep, m]`, log-sum-exp then `sum_c output_c * grad_c`.
    pub(crate) inputs: F,
    /// Gradient of the query.
    pub(crate) query_grad: BufferArg,
    /// Gradients of key, key_hat, value, value_hat, one after the other, each `[slices, n,
    /// head_dim]`.
    pub(crate) side_grads: BufferArg,
}

/// The backward pass, two launches.
///
/// # Errors
/// Fails as [`StreamProblem::check`] does.
pub(crate) fn launch_backward<F: Fn() -> [BufferArg; 5]>(
    client: &Client,
    bindings: BackwardBindings<F>,
    problem: &StreamProblem,
) -> Result<()> {
    let [rows, keys_and_values] = problem.backward_grids(&Limits::of(client.properties()))?;
    let inputs = || {
        let [query, keys, values, grad, stats] = (bindings.inputs)();
        GradientInputsLaunch::new(query, keys, values, grad, stats, problem.slices)
    };
    backward::queries::launch(
        client,
        rows.count(),
        rows.dim(),
        rows.address,
        inputs(),
        bindings.query_grad,
        problem.args(),
        problem.blueprint(&rows),
    );
    backward::keys_and_values::launch(
        client,
        keys_and_values.count(),
        keys_and_values.dim(),
        keys_and_values.address,
        inputs(),
        bindings.side_grads,
        problem.args(),
        problem.blueprint(&keys_and_values),
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KvCacheConfig;

    fn problem(slices: usize, n_rep: usize, tokens: usize) -> StreamProblem {
        let spec = StreamSpec::whole(&KvCacheConfig::float());
        let scores = Scores::PLAIN;
        StreamProblem { spec, slices, n_rep, m: tokens, n: tokens, head_dim: 64.into(), scores }
    }

    /// The backward pass writes the gradients of key, key_hat, value and value_hat to one buffer,
    /// which is four times as long as the keys.
    #[test]
    fn sizes_beyond_u32_are_refused() {
        let limits = &Limits::WEBGPU;
        let fits = problem(8, 1, 1 << 20);
        assert!(fits.forward_grid(None, limits).is_ok() && fits.backward_grids(limits).is_ok());
        let four_times_too_long = problem(8, 1, 1 << 21);
        assert!(four_times_too_long.forward_grid(None, limits).is_ok());
        let message = four_times_too_long.backward_grids(limits).unwrap_err().to_string();
        assert!(message.starts_with("gradient of streaming_attention of 4294967296"), "{message}");
        let message = problem(8, 9, 1 << 20).forward_grid(None, limits).unwrap_err().to_string();
        assert!(message.starts_with("streaming_attention of 4831838208"), "{message}");
    }

    #[test]
    fn long_texts_and_many_heads_are_spread() {
        for (slices, tokens) in [(1, 1 << 20), (1 << 16, 1 << 7)] {
            let problem = problem(slices, 1, tokens);
            let grids = problem.backward_grids(&Limits::WEBGPU).unwrap();
            assert!(grids[1].flat, "{slices} slices, {tokens} tokens");
        }
    }
}
