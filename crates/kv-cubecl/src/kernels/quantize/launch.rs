use cubecl::{client::Client, ir::ElemType, prelude::*};

use super::kernel;
use crate::{
    Result,
    kernels::{Grid, Limits, elementwise},
    layout::QuantSpec,
};

/// Sizes of a restored tensor `[slices, tokens, head_dim]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RestoreProblem {
    /// (batch, head) pairs.
    pub(crate) slices: usize,
    /// Tokens of a slice.
    pub(crate) tokens: usize,
    /// Channels.
    pub(crate) head_dim: usize,
    /// How the tensor is quantized.
    pub(crate) spec: QuantSpec,
}

impl RestoreProblem {
    pub(crate) fn elements(&self) -> usize {
        self.slices * self.tokens * self.head_dim
    }

    /// Checks that the device has enough cubes and wide enough indices for one unit per element,
    /// the longest launch.
    ///
    /// # Errors
    /// [`Unsupported`](crate::Error::Unsupported) naming `what`.
    pub(crate) fn check(&self, what: &str, limits: &Limits) -> Result<()> {
        Grid::elementwise(what, self.elements(), self.elements(), limits).map(drop)
    }

    /// Whole groups per channel after the first `skip` tokens, and groups in all.
    fn key_groups(&self, skip: usize) -> (usize, usize) {
        let groups = self.tokens.saturating_sub(skip) / self.spec.group_size;
        (groups, self.slices * groups * self.head_dim)
    }

    /// Groups of all tokens after the first `skip`.
    fn value_groups(&self, skip: usize) -> usize {
        let tokens = self.tokens.saturating_sub(skip);
        self.slices * tokens * (self.head_dim / self.spec.group_size)
    }
}

/// Restores packed keys into `out`, f32 `[slices, tokens, head_dim]`.
pub(crate) fn launch_dequantize_keys(
    client: &Client,
    words: BufferArg,
    out: BufferArg,
    problem: &RestoreProblem,
) -> Result<()> {
    let n = problem.elements();
    let grid = elementwise(client, "dequantize", n, problem.elements())?;
    let RestoreProblem { tokens, head_dim, spec, .. } = *problem;
    kernel::dequantize_keys::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        words,
        out,
        n,
        tokens,
        head_dim,
        spec.group_size,
        spec.n_bits,
    );
    Ok(())
}

/// Restores packed values into `out`, f32 `[slices, tokens, head_dim]`.
pub(crate) fn launch_dequantize_values(
    client: &Client,
    words: BufferArg,
    out: BufferArg,
    problem: &RestoreProblem,
) -> Result<()> {
    let n = problem.elements();
    let grid = elementwise(client, "dequantize", n, problem.elements())?;
    let RestoreProblem { head_dim, spec, .. } = *problem;
    kernel::dequantize_values::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        words,
        out,
        n,
        head_dim,
        spec.group_size,
        spec.n_bits,
    );
    Ok(())
}

/// Quantizes and restores keys in place: `data`, f32 `[slices, tokens, head_dim]`, from token
/// `skip` on up to the last whole group.
pub(crate) fn launch_fake_quantize_keys(
    client: &Client,
    data: BufferArg,
    problem: &RestoreProblem,
    skip: usize,
) -> Result<()> {
    let RestoreProblem { tokens, head_dim, spec, .. } = *problem;
    let (groups, n) = problem.key_groups(skip);
    if n > 0 {
        let grid = elementwise(client, "fake_quantize", n, problem.elements())?;
        kernel::fake_quantize_keys::launch(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            data,
            n,
            tokens,
            head_dim,
            skip,
            groups,
            spec.group_size,
            spec.n_bits,
        );
    }
    Ok(())
}

/// Quantizes and restores values in place: `data`, f32 `[slices, tokens, head_dim]`, from token
/// `skip` on.
pub(crate) fn launch_fake_quantize_values(
    client: &Client,
    data: BufferArg,
    problem: &RestoreProblem,
    skip: usize,
) -> Result<()> {
    let RestoreProblem { tokens, head_dim, spec, .. } = *problem;
    let n = problem.value_groups(skip);
    if n > 0 {
        let grid = elementwise(client, "fake_quantize", n, problem.elements())?;
        kernel::fake_quantize_values::launch(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            data,
            n,
            tokens,
            head_dim,
            skip,
            spec.group_size,
            spec.n_bits,
        );
    }
    Ok(())
}

/// Adds to `grad`, the gradient of fake-quantized keys, what passes through their scales. Shapes and
/// tokens as in [`launch_fake_quantize_keys`].
pub(crate) fn launch_scale_gradient_keys(
    client: &Client,
    data: BufferArg,
    grad: BufferArg,
    problem: &RestoreProblem,
    skip: usize,
) -> Result<()> {
    let RestoreProblem { tokens, head_dim, spec, .. } = *problem;
    let (groups, n) = problem.key_groups(skip);
    if n > 0 {
        let grid = elementwise(client, "gradient of fake_quantize", n, problem.elements())?;
        kernel::scale_gradient_keys::launch(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            data,
            grad,
            n,
            tokens,
            head_dim,
            skip,
            groups,
            spec.group_size,
            spec.n_bits,
        );
    }
    Ok(())
}

/// Adds to `grad`, the gradient of fake-quantized values, what passes through their scales. Shapes
/// and tokens as in [`launch_fake_quantize_values`].
pub(crate) fn launch_scale_gradient_values(
    client: &Client,
    data: BufferArg,
    grad: BufferArg,
    problem: &RestoreProblem,
    skip: usize,
) -> Result<()> {
    let RestoreProblem { tokens, head_dim, spec, .. } = *problem;
    let n = problem.value_groups(skip);
    if n > 0 {
        let grid = elementwise(client, "gradient of fake_quantize", n, problem.elements())?;
        kernel::scale_gradient_values::launch(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            data,
            grad,
            n,
            tokens,
            head_dim,
            skip,
            spec.group_size,
            spec.n_bits,
        );
    }
    Ok(())
}

/// Rounds `data`, `n` elements of f32, to the nearest finite `float` and back.
pub(crate) fn launch_round_trip(
    client: &Client,
    data: BufferArg,
    n: usize,
    float: ElemType,
) -> Result<()> {
    let grid = elementwise(client, "store", n, n)?;
    kernel::round_trip::launch(client, grid.count(), grid.dim(), grid.address, data, n, float);
    Ok(())
}
