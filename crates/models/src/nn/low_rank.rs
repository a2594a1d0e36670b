//! Adapters of packed weights.

use burn::{
    module::{Module, Param},
    tensor::{Device, Distribution, Int, Tensor, module::embedding},
};

use super::project::project;

/// `scale * B A`, added to a matrix `[rows, columns]` that is not trained (Hu et al., 2021,
/// <https://arxiv.org/abs/2106.09685>; over packed weights Dettmers et al., 2023,
/// <https://arxiv.org/abs/2305.14314>).
///
/// Products use one factor after the other. The product of the factors is computed only for
/// requested rows.
#[derive(Module, Debug)]
pub(crate) struct LowRank {
    /// `[rank, columns]`.
    a: Param<Tensor<2>>,
    /// `[rows, rank]`.
    b: Param<Tensor<2>>,
    scale: f64,
}

impl LowRank {
    /// Creates an adapter that adds zero: B is 0, and A is normal with the deviation of Burn's own
    /// adapters, `1 / rank`.
    pub(crate) fn new(
        [rows, columns]: [usize; 2],
        rank: usize,
        scale: f64,
        device: &Device,
    ) -> Self {
        let normal = Distribution::Normal(0.0, 1.0 / rank as f64);
        let (a, b) = device.memory_persistent_allocations((), |()| {
            (Tensor::random([rank, columns], normal, device), Tensor::zeros([rows, rank], device))
        });
        Self { a: Param::from_tensor(a), b: Param::from_tensor(b), scale }
    }

    /// Returns the term added to products of `x`: `[batch, seq, columns]` to `[batch, seq, rows]`.
    pub(crate) fn project(&self, x: Tensor<3>) -> Tensor<3> {
        project(project(x, self.a.val()), self.b.val()) * self.scale
    }

    /// Returns the term added to the gradient of inputs, from the gradient of products:
    /// `[batch, seq, rows]` to `[batch, seq, columns]`.
    pub(crate) fn back_project(&self, y: Tensor<3>) -> Tensor<3> {
        y.matmul(self.b.val().unsqueeze()).matmul(self.a.val().unsqueeze()) * self.scale
    }

    /// Returns the term added to `n` rows from `start` on: `[n, columns]`.
    pub(crate) fn rows(&self, start: usize, n: usize) -> Tensor<2> {
        self.b.val().narrow(0, start, n).matmul(self.a.val()) * self.scale
    }

    /// Returns the term added to the rows of these numbers: `[batch, seq]` to
    /// `[batch, seq, columns]`.
    pub(crate) fn lookup(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        embedding(self.b.val(), ids).matmul(self.a.val().unsqueeze()) * self.scale
    }
}
