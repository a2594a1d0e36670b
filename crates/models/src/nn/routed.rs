//! Mixtures of experts: each token is computed by the experts that a router selected for it.

use burn::tensor::{IndexingUpdateOp, Int, Tensor, TensorData};

/// The experts that a router selected for each token, and their weights.
#[derive(Clone, Debug)]
pub struct Routed {
    /// The numbers of the experts, `[n, per_token]`.
    pub picked: Tensor<2, Int>,
    /// The factors of their outputs, `[n, per_token]`.
    pub weights: Tensor<2>,
}

impl Routed {
    /// Returns the weighted sum of the outputs of the selected experts, by
    /// [`sum_all`](Self::sum_all) if the host must not read the selection (`on_device`), and else
    /// by [`sum_picked`](Self::sum_picked), which computes less.
    pub fn sum(
        self,
        x: Tensor<3>,
        n_experts: usize,
        on_device: bool,
        expert: impl Fn(usize, Tensor<3>) -> Tensor<3>,
    ) -> Tensor<3> {
        match on_device {
            true => self.sum_all(x, n_experts, expert),
            false => self.sum_picked(x, n_experts, expert),
        }
    }

    /// Returns the weighted sum of the outputs of the selected experts. The host reads the
    /// selection, so that each of the `n_experts` experts computes only its own tokens. `expert`
    /// applies the expert of a number.
    ///
    /// # Shapes
    /// - x: `[1, n, hidden]`
    /// - output: `[1, n, hidden]`
    pub fn sum_picked(
        self,
        x: Tensor<3>,
        n_experts: usize,
        expert: impl Fn(usize, Tensor<3>) -> Tensor<3>,
    ) -> Tensor<3> {
        let (device, [n, per_token]) = (x.device(), self.picked.dims());
        let weights = self.weights.reshape([1, n * per_token, 1]);
        // The positions in `[n, per_token]` at which each expert is selected.
        let mut picks = vec![vec![]; n_experts];
        for (pick, number) in self.picked.into_data().iter::<i64>().enumerate() {
            picks[number as usize].push(pick as i64);
        }
        let mut output = x.zeros_like();
        for (number, picks) in picks.into_iter().enumerate() {
            if picks.is_empty() {
                continue;
            }
            let tokens: Vec<_> = picks.iter().map(|p| p / per_token as i64).collect();
            let ids = |ids: Vec<i64>| {
                let len = ids.len();
                Tensor::<1, Int>::from_data(TensorData::new(ids, [len]), &device)
            };
            let (tokens, picks) = (ids(tokens), ids(picks));
            let y = expert(number, x.clone().select(1, tokens.clone()));
            let y = y * weights.clone().select(1, picks);
            output = output.select_assign(1, tokens, y, IndexingUpdateOp::Add);
        }
        output
    }

    /// Computes [`sum_picked`](Self::sum_picked) without the host: all experts compute all tokens,
    /// and experts that were not selected have weight 0.
    pub fn sum_all(
        self,
        x: Tensor<3>,
        n_experts: usize,
        expert: impl Fn(usize, Tensor<3>) -> Tensor<3>,
    ) -> Tensor<3> {
        let mut output = x.zeros_like();
        for number in 0..n_experts {
            let others = self.picked.clone().not_equal_elem(number as i64);
            let weight = self.weights.clone().mask_fill(others, 0.0).sum_dim(1); // [n, 1]
            output = output + expert(number, x.clone()) * weight.unsqueeze();
        }
        output
    }
}
