//! The selection of experts for each token, and their weights.

use std::path::Path;

use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor, activation};
use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    nn::Routed,
};

/// The selection of experts for each token by the logits of a router.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// The number of experts with the highest scores that compute a token.
    pub per_token: usize,
    /// The scores of experts.
    pub scores: Scores,
    /// True if the scores of the selected experts are divided by their sum.
    pub normalized: bool,
    /// The factor of the weights of the selected experts.
    pub scale: f64,
    /// The groups that limit the selection; `None` if all experts compete.
    pub groups: Option<ExpertGroups>,
    /// True if the logits are computed in f32 whatever the type of the model, as DeepSeek's code
    /// does.
    pub f32_logits: bool,
}

/// The function from the logits of a router to the scores of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scores {
    /// Probabilities over all experts.
    Softmax,
    /// The sigmoid of each logit.
    Sigmoid,
    /// The square root of the softplus of each logit.
    #[serde(skip)]
    SqrtSoftplus,
}

/// Groups of experts. A token first selects groups, then experts in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups, each of equally many consecutive experts.
    pub n_groups: usize,
    /// The number of groups with the highest scores whose experts compete.
    pub selected: usize,
    /// The number of experts with the highest scores whose sum is the score of a group.
    pub per_score: usize,
}

/// Keeps a sum of scores that are all 0 from being a divisor.
const LEAST_SUM: f64 = 1e-20;

impl Routing {
    /// Selects by the probabilities of all experts.
    pub const fn softmax(per_token: usize, normalized: bool) -> Self {
        let (scores, scale, groups) = (Scores::Softmax, 1.0, None);
        Self { per_token, scores, normalized, scale, groups, f32_logits: false }
    }

    /// Selects experts. `bias`, `[n_experts]`, is added to the scores in the selection only.
    ///
    /// # Shapes
    /// - logits: `[n, n_experts]`
    /// - the selection and its weights in f32: `[n, per_token]`
    pub fn route(&self, logits: Tensor<2>, bias: Option<Tensor<1>>) -> Routed {
        let scores = self.scores(logits);
        let picked = self.pick(scores.clone().detach(), bias);
        self.weigh(scores, picked)
    }

    /// Returns the scores of all experts in f32, `[n, n_experts]`.
    pub fn scores(&self, logits: Tensor<2>) -> Tensor<2> {
        let logits = logits.cast(DType::F32);
        match self.scores {
            Scores::Softmax => activation::softmax(logits, 1),
            Scores::Sigmoid => activation::sigmoid(logits),
            Scores::SqrtSoftplus => activation::softplus(logits, 1.0).sqrt(),
        }
    }

    fn pick(&self, scores: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<2, Int> {
        let scores = match bias {
            Some(bias) => scores + bias.cast(DType::F32).detach().unsqueeze(),
            None => scores,
        };
        let scores = match self.groups {
            Some(groups) => groups.limit(scores),
            None => scores,
        };
        scores.topk_with_indices(self.per_token, 1).1
    }

    /// Returns the weights of the experts that are `picked` by `scores`, `[n, n_experts]`.
    pub fn weigh(&self, scores: Tensor<2>, picked: Tensor<2, Int>) -> Routed {
        let mut weights = scores.gather(1, picked.clone());
        if self.normalized {
            let sums = weights.clone().sum_dim(1);
            weights = weights
                / match self.scores {
                    Scores::Softmax => sums,
                    Scores::Sigmoid | Scores::SqrtSoftplus => sums + LEAST_SUM,
                };
        }
        if self.scale != 1.0 {
            weights = weights * self.scale;
        }
        Routed { picked, weights }
    }
}

impl ExpertGroups {
    /// Checks that `n_experts` form groups, and that a token finds its experts in the groups that
    /// it selects.
    pub(crate) fn check(self, path: &Path, n_experts: usize, per_token: usize) -> Result<()> {
        let Self { n_groups, selected, per_score } = self;
        let error = |field: &str, value, rule| Err(Error::config(path, field, value, rule));
        if !n_experts.is_multiple_of(n_groups) {
            return error("n_group", n_groups, format!("must divide n_routed_experts {n_experts}"));
        }
        if selected > n_groups {
            return error("topk_group", selected, format!("must be at most n_group {n_groups}"));
        }
        let in_groups = n_experts / n_groups * selected;
        if per_token > in_groups {
            let rule = format!(
                "must be at most {in_groups}, the experts in topk_group {selected} of n_group \
                 {n_groups} groups; raise topk_group"
            );
            return error("num_experts_per_tok", per_token, rule);
        }
        if selected < n_groups && n_experts / n_groups < per_score {
            let rule = format!(
                "must leave at least {per_score} of {n_experts} experts per group, whose best \
                 {per_score} score it"
            );
            return error("n_group", n_groups, rule);
        }
        Ok(())
    }

    /// Returns the scores, `[n, n_experts]`, with minus infinity outside the selected groups.
    fn limit(self, scores: Tensor<2>) -> Tensor<2> {
        let [n, n_experts] = scores.dims();
        let grouped = scores.reshape([n, self.n_groups, n_experts / self.n_groups]);
        let of_groups = grouped.clone().topk(self.per_score, 2).sum_dim(2).squeeze_dim::<2>(2);
        let (_, selected) = of_groups.clone().topk_with_indices(self.selected, 1);
        let ones = Tensor::ones([n, self.selected], &of_groups.device());
        let none = of_groups.zeros_like();
        let selected = none.scatter(1, selected, ones, IndexingUpdateOp::Add); // [n, n_groups]
        let others = selected.equal_elem(0.0).unsqueeze_dim::<3>(2).expand(grouped.dims());
        grouped.mask_fill(others, f32::NEG_INFINITY).reshape([n, n_experts])
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    /// Six experts in three groups. The best expert is alone in its group, and the best pair is in
    /// another.
    #[test]
    fn groups_are_scored_by_their_best_experts() {
        let device = Device::flex();
        let logits = Tensor::<2>::from_data([[3.0, -3.0, 1.0, 2.0, 0.5, 0.0]], &device);
        let bias = Tensor::<1>::from_data([0.0, 0.0, 0.0, 0.0, 0.0, 1.0], &device);
        let route = |per_score, bias: Option<Tensor<1>>| {
            let groups = ExpertGroups { n_groups: 3, selected: 1, per_score };
            let routing = Routing {
                per_token: 2,
                scores: Scores::Sigmoid,
                normalized: true,
                scale: 2.5,
                groups: Some(groups),
                f32_logits: true,
            };
            let Routed { picked, weights } = routing.route(logits.clone(), bias);
            let picked: Vec<i64> = picked.into_data().iter::<i64>().collect();
            let weights: Vec<f32> = weights.into_data().iter::<f32>().collect();
            (picked, weights)
        };
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        let expected = |logits: [f32; 2]| {
            let scores = logits.map(sigmoid);
            scores.map(|score| 2.5 * score / (scores[0] + scores[1]))
        };
        for (per_score, bias, picked, logits) in [
            (1, None, [0, 1], [3.0, -3.0]),
            (2, None, [3, 2], [2.0, 1.0]),
            // The bias selects a group and its first expert, but is no part of the weights.
            (2, Some(bias), [5, 4], [0.0, 0.5]),
        ] {
            let (got, weights) = route(per_score, bias);
            assert_eq!(got, picked);
            for (got, want) in weights.into_iter().zip(expected(logits)) {
                assert!((got - want).abs() < 1e-6, "{got}, not {want}");
            }
        }
    }
}
