//! The mixture of experts of Qwen3-MoE.

use burn::{
    module::Module,
    tensor::{DType, Tensor, activation},
};

use super::Config;
use crate::{
    decoder::Role,
    error::Result,
    nn::{GatedMlp, Gating, Linear, Routed},
    stack::{LayerSource, LayerVisitor},
};

/// The experts of a layer, and the router that selects some for every token.
#[derive(Module, Debug)]
pub struct Experts {
    /// Computes a score for every expert, `[n_experts, hidden]`.
    pub router: Linear,
    /// The experts.
    pub experts: Vec<GatedMlp>,
    /// The number of experts with the highest probability that compute a token.
    pub per_token: usize,
    /// True if the probabilities of the selected experts are divided by their sum.
    pub normalized: bool,
}

impl Experts {
    /// Applies the experts that the router selects for each token, weighted by their
    /// probabilities. Graph capture cannot wait for the host: with `on_device`, all experts compute
    /// all tokens, and experts that were not selected get weight 0.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden]`
    /// - output: `[batch, seq, hidden]`
    pub fn forward(&self, x: Tensor<3>, on_device: bool) -> Tensor<3> {
        let [batch, seq, hidden] = x.dims();
        let (n, n_experts) = (batch * seq, self.experts.len());
        let x = x.reshape([1, n, hidden]);
        let scores = self.router.forward(x.clone()).reshape([n, n_experts]);
        let dtype = scores.dtype();
        let shares = activation::softmax(scores.cast(DType::F32), 1);
        let (_, picked) = shares.clone().detach().topk_with_indices(self.per_token, 1);
        let mut weights = shares.gather(1, picked.clone());
        if self.normalized {
            weights = weights.clone() / weights.sum_dim(1);
        }
        let routed = Routed { picked, weights: weights.cast(dtype) };
        let expert = |i: usize, x| self.experts[i].forward(x);
        routed.sum(x, n_experts, on_device, expert).reshape([batch, seq, hidden])
    }

    pub(super) fn build(config: &Config, source: &mut LayerSource<'_>) -> Result<Self> {
        let (width, wide) = (config.base.hidden_size, config.expert_size);
        let expert = |i| {
            let [gate, up, down] = names(i);
            Ok(GatedMlp {
                gate_up: source.fused(&[(&gate, wide), (&up, wide)], width, false)?,
                down: source.residual(&down, [width, wide], false)?,
                gating: Gating::Silu,
            })
        };
        Ok(Self {
            experts: (0..config.n_experts).map(expert).collect::<Result<_>>()?,
            router: source.linear(ROUTER, [config.n_experts, width], false)?,
            per_token: config.experts_per_token,
            normalized: config.normalized,
        })
    }

    pub(super) fn visit(&self, wide: usize, visitor: &mut LayerVisitor<'_>) {
        visitor.linear(Role::Mlp, ROUTER, &self.router);
        for (i, expert) in self.experts.iter().enumerate() {
            let [gate, up, down] = names(i);
            visitor.fused(Role::Mlp, &[(&gate, wide), (&up, wide)], &expert.gate_up);
            visitor.linear(Role::Mlp, &down, &expert.down);
        }
    }
}

const ROUTER: &str = "mlp.gate";

fn names(expert: usize) -> [String; 3] {
    ["gate_proj", "up_proj", "down_proj"].map(|part| format!("mlp.experts.{expert}.{part}"))
}
