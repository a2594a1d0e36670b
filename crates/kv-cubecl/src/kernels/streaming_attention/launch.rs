use cubecl::{client::Client, prelude::*};

use super::{
    backward,
    forward::{self, ForwardBlueprint},
    kernel::{self, ROWS, StreamArgsLaunch, StreamBlueprint},
};
use crate::{
    kernels::row_blocks::{Processor, RowBlocks, VECTOR},
    layout::StreamSpec,
};

/// Sizes of a call of the closed form.
#[derive(Clone, Copy, Debug)]
pub struct StreamProblem {
    /// Which tokens, and what each row sees.
    pub spec: StreamSpec,
    /// (batch, kv head) pairs.
    pub slices: usize,
    /// Query heads per kv head.
    pub n_rep: usize,
    /// Query rows of a head.
    pub m: usize,
    /// Keys of a slice.
    pub n: usize,
    /// Channels, at most 256.
    pub head_dim: usize,
}

impl StreamProblem {
    fn args(&self) -> StreamArgsLaunch {
        StreamArgsLaunch::new(
            self.m,
            self.n,
            self.n_rep,
            self.spec.first_query,
            self.spec.first_key,
            self.spec.window.args(),
            1.0 / (self.head_dim as f32).sqrt(),
        )
    }

    fn blueprint(&self) -> StreamBlueprint {
        let units = if self.head_dim <= 64 { 64 } else { 128 };
        StreamBlueprint { head_dim: self.head_dim, units }
    }

    fn row_cubes(&self, rows: usize) -> CubeCount {
        let heads = self.slices * self.n_rep;
        CubeCount::Static(self.m.div_ceil(rows) as u32, heads as u32, 1)
    }
}

/// Buffers of the forward pass, all contiguous f32.
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
pub struct ForwardBindings {
    /// `[slices, n_rep, m, head_dim]`.
    pub query: BufferArg,
    /// `[slices, n, head_dim]`.
    pub key: BufferArg,
    /// What the keys restore to.
    pub key_hat: BufferArg,
    /// `[slices, n, head_dim]`.
    pub value: BufferArg,
    /// What the values restore to.
    pub value_hat: BufferArg,
    /// `[slices, n_rep, m, head_dim]`.
    pub output: BufferArg,
    /// `[slices, n_rep, m]`.
    pub lse: BufferArg,
}

/// Attends; one launch.
pub fn launch_forward(client: &Client, bindings: ForwardBindings, problem: &StreamProblem) {
    // Tokens and channels are in no groups here.
    let processor = Processor::of(client.properties());
    if let Some(blocks) = RowBlocks::new(problem.head_dim, 0, 0, processor) {
        let window = &problem.spec.window;
        let blueprint = ForwardBlueprint { blocks, keys: window.keys, values: window.values };
        // SAFETY: every index is below the length of its buffer: rows, tokens and channels are below
        // theirs.
        unsafe {
            forward::forward_blocked::launch_unchecked(
                client,
                problem.row_cubes(blocks.rows),
                CubeDim::new_1d(blocks.units as u32),
                VECTOR,
                bindings.query,
                bindings.key,
                bindings.key_hat,
                bindings.value,
                bindings.value_hat,
                bindings.output,
                bindings.lse,
                problem.args(),
                blueprint,
            );
        }
        return;
    }
    let blueprint = problem.blueprint();
    kernel::forward::launch(
        client,
        problem.row_cubes(ROWS),
        CubeDim::new_1d(blueprint.units as u32),
        bindings.query,
        bindings.key,
        bindings.key_hat,
        bindings.value,
        bindings.value_hat,
        bindings.output,
        bindings.lse,
        problem.args(),
        blueprint,
    );
}

/// Buffers of the backward pass, all contiguous f32; inputs are read by two kernels.
#[allow(missing_debug_implementations, reason = "buffer arguments have none")]
pub struct BackwardBindings<F: Fn() -> [BufferArg; 5]> {
    /// Query `[slices, n_rep, m, head_dim]`; keys and values `[2, slices, n, head_dim]`, floats
    /// then what they restore to; gradient of the output; stats `[2, slices * n_rep, m]`, the
    /// log-sum-exp then `sum_c output_c * grad_c`.
    pub inputs: F,
    /// Gradient of the query.
    pub query_grad: BufferArg,
    /// Gradients of key, key_hat, value, value_hat, `[4, slices, n, head_dim]`.
    pub side_grads: BufferArg,
}

/// Computes the gradients; two launches.
pub fn launch_backward<F: Fn() -> [BufferArg; 5]>(
    client: &Client,
    bindings: BackwardBindings<F>,
    problem: &StreamProblem,
) {
    let blueprint = problem.blueprint();
    let dim = CubeDim::new_1d(blueprint.units as u32);
    let [query, keys, values, grad, stats] = (bindings.inputs)();
    backward::queries::launch(
        client,
        problem.row_cubes(ROWS),
        dim,
        query,
        keys,
        values,
        grad,
        stats,
        bindings.query_grad,
        problem.args(),
        problem.slices,
        blueprint,
    );
    let key_cubes = problem.n.div_ceil(backward::KEYS_PER_CUBE);
    let [query, keys, values, grad, stats] = (bindings.inputs)();
    backward::keys_and_values::launch(
        client,
        CubeCount::Static(key_cubes as u32, problem.slices as u32, 1),
        dim,
        query,
        keys,
        values,
        grad,
        stats,
        bindings.side_grads,
        problem.args(),
        problem.slices,
        blueprint,
    );
}
