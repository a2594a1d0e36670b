use cubecl::{client::Client, prelude::*};

use super::kernel;
use crate::{kernels::elementwise, layout::QuantSpec};

/// Sizes of a restored tensor `[slices, tokens, head_dim]`.
#[derive(Clone, Copy, Debug)]
pub struct RestoreProblem {
    /// (batch, head) pairs.
    pub slices: usize,
    /// Tokens of a slice.
    pub tokens: usize,
    /// Channels.
    pub head_dim: usize,
    /// How the tensor is quantized.
    pub spec: QuantSpec,
}

impl RestoreProblem {
    fn elements(&self) -> usize {
        self.slices * self.tokens * self.head_dim
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
pub fn launch_dequantize_keys(
    client: &Client,
    words: BufferArg,
    out: BufferArg,
    problem: &RestoreProblem,
) {
    let n = problem.elements();
    let (count, dim) = elementwise(n);
    let RestoreProblem { tokens, head_dim, spec, .. } = *problem;
    kernel::dequantize_keys::launch(
        client,
        count,
        dim,
        words,
        out,
        n,
        tokens,
        head_dim,
        spec.group_size,
        spec.n_bits,
    );
}

/// Restores packed values into `out`, f32 `[slices, tokens, head_dim]`.
pub fn launch_dequantize_values(
    client: &Client,
    words: BufferArg,
    out: BufferArg,
    problem: &RestoreProblem,
) {
    let n = problem.elements();
    let (count, dim) = elementwise(n);
    let RestoreProblem { head_dim, spec, .. } = *problem;
    kernel::dequantize_values::launch(
        client,
        count,
        dim,
        words,
        out,
        n,
        head_dim,
        spec.group_size,
        spec.n_bits,
    );
}

/// Replaces `data`, f32 `[slices, tokens, head_dim]`, by what its keys restore to, from token
/// `skip` on and up to the last whole group.
pub fn launch_fake_quantize_keys(
    client: &Client,
    data: BufferArg,
    problem: &RestoreProblem,
    skip: usize,
) {
    let RestoreProblem { tokens, head_dim, spec, .. } = *problem;
    let (groups, n) = problem.key_groups(skip);
    if n > 0 {
        let (count, dim) = elementwise(n);
        kernel::fake_quantize_keys::launch(
            client,
            count,
            dim,
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
}

/// Replaces `data`, f32 `[slices, tokens, head_dim]`, by what its values restore to, from token
/// `skip` on.
pub fn launch_fake_quantize_values(
    client: &Client,
    data: BufferArg,
    problem: &RestoreProblem,
    skip: usize,
) {
    let RestoreProblem { tokens, head_dim, spec, .. } = *problem;
    let n = problem.value_groups(skip);
    if n > 0 {
        let (count, dim) = elementwise(n);
        kernel::fake_quantize_values::launch(
            client,
            count,
            dim,
            data,
            n,
            tokens,
            head_dim,
            skip,
            spec.group_size,
            spec.n_bits,
        );
    }
}

/// Adds to `grad`, the gradient of fake-quantized keys, what passes through their scales. Shapes and
/// tokens as in [`launch_fake_quantize_keys`].
pub fn launch_scale_gradient_keys(
    client: &Client,
    data: BufferArg,
    grad: BufferArg,
    problem: &RestoreProblem,
    skip: usize,
) {
    let RestoreProblem { tokens, head_dim, spec, .. } = *problem;
    let (groups, n) = problem.key_groups(skip);
    if n > 0 {
        let (count, dim) = elementwise(n);
        kernel::scale_gradient_keys::launch(
            client,
            count,
            dim,
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
}

/// Adds to `grad`, the gradient of fake-quantized values, what passes through their scales. Shapes
/// and tokens as in [`launch_fake_quantize_values`].
pub fn launch_scale_gradient_values(
    client: &Client,
    data: BufferArg,
    grad: BufferArg,
    problem: &RestoreProblem,
    skip: usize,
) {
    let RestoreProblem { tokens, head_dim, spec, .. } = *problem;
    let n = problem.value_groups(skip);
    if n > 0 {
        let (count, dim) = elementwise(n);
        kernel::scale_gradient_values::launch(
            client,
            count,
            dim,
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
}
