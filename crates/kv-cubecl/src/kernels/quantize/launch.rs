use cubecl::{client::Client, prelude::*};

use super::kernel::{self, RestoredLaunch};
use crate::{CacheFloat, Result, kernels::elementwise, layout::QuantSpec};

/// Sizes of a restored tensor `[slices, tokens, head_dim]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RestoreProblem {
    /// (batch, head) pairs.
    pub(crate) slices: usize,
    /// Tokens of a slice.
    pub(crate) tokens: usize,
    /// Channels.
    pub(crate) head_dim: usize,
    /// Quantization of the tensor.
    pub(crate) spec: QuantSpec,
}

impl RestoreProblem {
    pub(crate) fn elements(&self) -> usize {
        self.slices * self.tokens * self.head_dim
    }

    /// Returns the range of tokens restored after the first `skip`, in whole blocks, and the number
    /// of their groups in all slices.
    fn restored(&self, skip: usize) -> (RestoredLaunch, usize) {
        let Self { slices, tokens, head_dim, spec } = *self;
        let blocks = tokens.saturating_sub(skip) / spec.block_tokens();
        let n = slices * blocks * spec.groups(head_dim);
        (RestoredLaunch::new(tokens, head_dim, skip, blocks), n)
    }
}

/// Restores packed tokens into `out`, f32 `[slices, tokens, head_dim]`.
pub(crate) fn launch_dequantize(
    client: &Client,
    words: BufferArg,
    out: BufferArg,
    problem: &RestoreProblem,
) -> Result<()> {
    let n = problem.elements();
    let grid = elementwise(client, "dequantize", n, n)?;
    let RestoreProblem { tokens, head_dim, spec, .. } = *problem;
    kernel::dequantize::launch(
        client,
        grid.count(),
        grid.dim(),
        grid.address,
        words,
        out,
        n,
        tokens,
        spec.words(tokens, head_dim),
        head_dim,
        spec,
    );
    Ok(())
}

/// Quantizes and restores `data`, f32 `[slices, tokens, head_dim]`, in place, from token `skip` to
/// the end of the last whole block of tokens.
pub(crate) fn launch_fake_quantize(
    client: &Client,
    data: BufferArg,
    problem: &RestoreProblem,
    skip: usize,
) -> Result<()> {
    let (restored, n) = problem.restored(skip);
    if n > 0 {
        let grid = elementwise(client, "fake_quantize", n, problem.elements())?;
        kernel::fake_quantize::launch(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            data,
            n,
            restored,
            problem.spec,
        );
    }
    Ok(())
}

/// Adds to `grad`, the gradient of what [`launch_fake_quantize`] makes of `data`, what passes
/// through the scales.
pub(crate) fn launch_scale_gradient(
    client: &Client,
    data: BufferArg,
    grad: BufferArg,
    problem: &RestoreProblem,
    skip: usize,
) -> Result<()> {
    let (restored, n) = problem.restored(skip);
    if n > 0 {
        let grid = elementwise(client, "gradient of fake_quantize", n, problem.elements())?;
        kernel::scale_gradient::launch(
            client,
            grid.count(),
            grid.dim(),
            grid.address,
            data,
            grad,
            n,
            restored,
            problem.spec,
        );
    }
    Ok(())
}

/// Rounds `data`, `n` elements of f32, as storing them in a cache of this type does.
pub(crate) fn launch_round_trip(
    client: &Client,
    data: BufferArg,
    n: usize,
    float: CacheFloat,
) -> Result<()> {
    let grid = elementwise(client, "store", n, n)?;
    let (count, dim, saturating) = (grid.count(), grid.dim(), float.saturates());
    let elem = float.elem();
    kernel::round_trip::launch(client, count, dim, grid.address, data, n, saturating, elem);
    Ok(())
}
