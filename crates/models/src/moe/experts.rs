//! The mixture of experts of a layer.

use burn::{
    module::Module,
    tensor::{DType, Tensor, activation},
};

use super::config::{ExpertNames, ExpertsConfig};
use crate::{
    decoder::Role,
    error::Result,
    nn::{ExpertStacks, GatedMlp, Gating, Linear, Routed, gated},
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
    /// The projections of all experts, if they are packed on a GPU.
    #[module(skip)]
    pub stacks: Option<ExpertStacks>,
}

impl Experts {
    /// Applies the experts that the router selects for each token, weighted by their
    /// probabilities.
    ///
    /// For few tokens, a GPU with packed weights selects the experts itself. Otherwise the host
    /// reads the selection, so that each expert computes only its own tokens. Graph capture cannot
    /// wait for the host: with `on_device` and weights that are not packed, all experts compute all
    /// tokens, and experts that were not selected get weight 0.
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
        let projections = || self.experts.iter().flat_map(|expert| [&expert.gate_up, &expert.down]);
        let stacks = self.stacks.as_ref();
        let output = match stacks.filter(|stacks| stacks.can_compute(&x, on_device, projections()))
        {
            Some(stacks) => stacks.sum(x, routed, |gate_up| gated(gate_up, Gating::Silu)),
            None => routed.sum(x, n_experts, on_device, |i, x| self.experts[i].forward(x)),
        };
        output.reshape([batch, seq, hidden])
    }

    pub(super) fn build(
        config: ExpertsConfig,
        hidden: usize,
        names: &ExpertNames,
        source: &mut LayerSource<'_>,
    ) -> Result<Self> {
        let ExpertsConfig { n_experts: n, per_token, width: wide, normalized } = config;
        let is_gguf = source.gguf().is_some();
        let names = if is_gguf { &ExpertNames::QWEN } else { names };
        let router = source.linear(names.router, [n, hidden], false)?;
        let [gate, up, down] = names.of_all().map(|name| source.name(&name));
        let (experts, stacks) = match source.gguf() {
            Some(weights) => {
                let gate_up = weights.joined_experts([&gate, &up], [n, wide, hidden], false)?;
                weights.gated_experts(gate_up, &down, [n, hidden, wide], false)?
            }
            None => {
                let expert = |i| {
                    let [gate, up, down] = names.of(i);
                    let gate_up = source.fused(&[(&gate, wide), (&up, wide)], hidden, false)?;
                    Ok([gate_up, source.residual(&down, [hidden, wide], false)?])
                };
                ((0..n).map(expert).collect::<Result<_>>()?, None)
            }
        };
        let expert =
            |[gate_up, down]: [Linear; 2]| GatedMlp { gate_up, down, gating: Gating::Silu };
        Ok(Self {
            router,
            experts: experts.into_iter().map(expert).collect(),
            per_token,
            normalized,
            stacks,
        })
    }

    pub(super) fn visit(&self, names: &ExpertNames, visitor: &mut LayerVisitor<'_>) {
        visitor.linear(Role::Mlp, names.router, &self.router);
        for (i, expert) in self.experts.iter().enumerate() {
            let [gate, up, down] = names.of(i);
            let wide = expert.down.weight.dims()[1];
            visitor.fused(Role::Mlp, &[(&gate, wide), (&up, wide)], &expert.gate_up);
            visitor.linear(Role::Mlp, &down, &expert.down);
        }
    }
}
