//! The mixture of experts of a layer.

use burn::{
    module::{Module, Param},
    tensor::Tensor,
};

use super::{
    config::{ExpertNames, ExpertsConfig},
    routing::Routing,
};
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
    /// The bias of scores in the selection of experts, `[n_experts]`, if the model has one.
    pub router_bias: Option<Param<Tensor<1>>>,
    /// The experts.
    pub experts: Vec<GatedMlp>,
    /// The MLP that computes all tokens, if the model has one.
    pub shared: Option<GatedMlp>,
    /// The selection of experts.
    #[module(skip)]
    pub routing: Routing,
    /// The projections of all experts, if they are packed in one buffer or one range of a file.
    #[module(skip)]
    pub stacks: Option<ExpertStacks>,
}

/// The bias of the selection in GGUF files, by the table of GGUF names.
const GGUF_BIAS: &str = "mlp.gate.e_score_correction.bias";

impl Experts {
    /// Applies the experts that the router selects for each token, weighted by their scores, and
    /// the shared MLP.
    ///
    /// For few tokens and packed weights, one operation multiplies with the experts of all tokens.
    /// Otherwise the host reads the selection, so that each expert computes only its own tokens.
    /// Graph capture cannot wait for the host: with `on_device` and weights that are not packed,
    /// all experts compute all tokens, and experts that were not selected get weight 0.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden]`
    /// - output: `[batch, seq, hidden]`
    pub fn forward(&self, x: Tensor<3>, on_device: bool) -> Tensor<3> {
        let [batch, seq, hidden] = x.dims();
        let (n, n_experts) = (batch * seq, self.experts.len());
        let x = x.reshape([1, n, hidden]);
        let routed = self.route(&x);
        let projections = || self.experts.iter().flat_map(|expert| [&expert.gate_up, &expert.down]);
        let stacks = self.stacks.as_ref();
        let shared = self.shared.as_ref().map(|shared| shared.forward(x.clone()));
        let stacks = stacks.filter(|stacks| stacks.can_compute(&x, on_device, projections()));
        let output = match stacks {
            Some(stacks) => stacks.sum(x, routed, |gate_up| gated(gate_up, Gating::Silu)),
            None => routed.sum(x, n_experts, on_device, |i, x| self.experts[i].forward(x)),
        };
        let output = output.reshape([batch, seq, hidden]);
        match shared {
            Some(shared) => output + shared.reshape([batch, seq, hidden]),
            None => output,
        }
    }

    /// Selects experts for all tokens, `[1, n, hidden]`.
    fn route(&self, x: &Tensor<3>) -> Routed {
        let logits = match self.routing.f32_logits {
            true => self.router.weight.project_in_f32(x.clone()),
            false => self.router.forward(x.clone()),
        };
        let logits = logits.reshape([x.dims()[1], self.experts.len()]);
        let bias = self.router_bias.as_ref().map(Param::val);
        let Routed { picked, weights } = self.routing.route(logits, bias);
        Routed { picked, weights: weights.cast(x.dtype()) }
    }

    pub(super) fn build(
        config: ExpertsConfig,
        hidden: usize,
        names: &ExpertNames,
        source: &mut LayerSource<'_>,
    ) -> Result<Self> {
        let ExpertsConfig { n_experts: n, width: wide, routing, has_bias, shared } = config;
        let is_gguf = source.gguf().is_some();
        let names = if is_gguf { &ExpertNames::QWEN } else { names };
        let router = source.linear(names.router, [n, hidden], false)?;
        let bias = if is_gguf { GGUF_BIAS } else { names.bias };
        let router_bias = has_bias.then(|| source.vector(bias, n, 0.0)).transpose()?;
        let [gate, up, down] = names.of_all().map(|name| source.name(&name));
        let (experts, stacks) = match source.gguf() {
            Some(weights) => {
                let gate_up = weights.joined_experts([&gate, &up], [n, wide, hidden], false)?;
                let (experts, stacks) =
                    weights.gated_experts(gate_up, &down, [n, hidden, wide], false)?;
                let expert =
                    |[gate_up, down]: [Linear; 2]| GatedMlp { gate_up, down, gating: Gating::Silu };
                (experts.into_iter().map(expert).collect(), stacks)
            }
            None => {
                let expert = |i| source.mlp(&names.of(i), [hidden, wide], Gating::Silu);
                ((0..n).map(expert).collect::<Result<_>>()?, None)
            }
        };
        let shared = shared.map(|wide| source.mlp(&names.shared(), [hidden, wide], Gating::Silu));
        Ok(Self { router, router_bias, experts, shared: shared.transpose()?, routing, stacks })
    }

    pub(super) fn visit(&self, names: &ExpertNames, visitor: &mut LayerVisitor<'_>) {
        visitor.linear(Role::Mlp, names.router, &self.router);
        if let Some(bias) = &self.router_bias {
            visitor.vector(Role::Mlp, names.bias, bias);
        }
        for (i, expert) in self.experts.iter().enumerate() {
            visitor.mlp(&names.of(i), expert);
        }
        if let Some(shared) = &self.shared {
            visitor.mlp(&names.shared(), shared);
        }
    }

    /// Returns the MLPs of all experts and the shared one.
    pub(super) fn mlps(&mut self) -> impl Iterator<Item = &mut GatedMlp> {
        self.experts.iter_mut().chain(&mut self.shared)
    }
}
