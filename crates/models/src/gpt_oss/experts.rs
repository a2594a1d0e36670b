//! The mixture of experts of gpt-oss.

use burn::{
    module::Module,
    tensor::{Tensor, activation},
};

use super::config::{ALPHA, Config};
use crate::{
    checkpoint::{ExpertRows, Exports, RowOrder, Weights},
    error::Result,
    nn::{ExpertStacks, Linear, Routed},
};

/// The experts of a layer, and the router that selects some for every token.
#[derive(Module, Debug)]
pub struct Experts {
    /// Computes a score for every expert, `[n_experts, hidden]`.
    pub router: Linear,
    /// The experts.
    pub experts: Vec<Expert>,
    /// The number of experts with the highest scores that compute a token, weighted by the softmax
    /// of these scores.
    pub per_token: usize,
    /// The bound of the values of the gate and of the linear part.
    pub limit: f64,
    /// The projections of all experts, if they are packed in one buffer or one range of a file.
    #[module(skip)]
    pub stacks: Option<ExpertStacks>,
}

/// A gated MLP, `down((clamp(up(x)) + 1) * g * sigmoid(1.702 g))` with `g = clamp(gate(x))`.
#[derive(Module, Debug)]
pub struct Expert {
    /// The gate rows, then the up rows: `[2 * intermediate, hidden]`.
    pub gate_up: Linear,
    /// The output projection, `[hidden, intermediate]`.
    pub down: Linear,
}

impl Expert {
    fn forward(&self, x: Tensor<3>, limit: f64) -> Tensor<3> {
        self.down.forward(gated(self.gate_up.forward(x), limit))
    }
}

/// Applies the gate of an expert: `[_, _, 2 * intermediate]` to `[_, _, intermediate]`.
fn gated(gate_up: Tensor<3>, limit: f64) -> Tensor<3> {
    let intermediate = gate_up.dims()[2] / 2;
    let gate = gate_up.clone().narrow(2, 0, intermediate).clamp_max(limit);
    let up = gate_up.narrow(2, intermediate, intermediate).clamp(-limit, limit);
    let gate = gate.clone() * activation::sigmoid(gate * ALPHA);
    (up + 1.0) * gate
}

impl Experts {
    /// Applies the experts that the router selects for each token.
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
        let n = batch * seq;
        let x = x.reshape([1, n, hidden]);
        let scores = self.router.forward(x.clone()).reshape([n, self.experts.len()]);
        let (_, picked) = scores.clone().detach().topk_with_indices(self.per_token, 1);
        let weights = activation::softmax(scores.gather(1, picked.clone()), 1);
        let (routed, n_experts) = (Routed { picked, weights }, self.experts.len());
        let projections = || self.experts.iter().flat_map(|expert| [&expert.gate_up, &expert.down]);
        let stacks = self.stacks.as_ref();
        let output =
            match stacks.filter(|stacks| stacks.can_compute(&x, on_device, projections())) {
                Some(stacks) => stacks.sum(x, routed, |gate_up| gated(gate_up, self.limit)),
                None => routed
                    .sum(x, n_experts, on_device, |i, x| self.experts[i].forward(x, self.limit)),
            };
        output.reshape([batch, seq, hidden])
    }

    /// Returns whether a graph replay multiplies only with the selected experts.
    pub(super) fn picks_on_device(&self) -> bool {
        self.stacks.is_some()
    }
}

impl Experts {
    /// Imports the experts of the MLP `layer`.
    ///
    /// Hugging Face files store all experts of a layer in one tensor, with gate and up rows
    /// alternating: floats as `[expert, columns, rows]`, or blocks of MXFP4. GGUF files store gate
    /// and up rows in two tensors, `[expert, rows, columns]`.
    pub(super) fn import(config: &Config, layer: &str, weights: &mut Weights) -> Result<Self> {
        let (n_experts, hidden_size) = (config.n_experts, config.shared.hidden_size);
        let width = config.shared.intermediate_size;
        let router = [(format!("{layer}.router"), n_experts)];
        let router = weights.linear(&router, hidden_size, true)?;
        let name = |part: &str| format!("{layer}.experts.{part}");
        let gate_up = if weights.is_gguf() {
            let [gate, up] = ["gate_proj", "up_proj"].map(name);
            weights.joined_experts([&gate, &up], [n_experts, width, hidden_size], true)?
        } else {
            let shape = [n_experts, 2 * width, hidden_size];
            let all = weights.experts(&name("gate_up_proj"), shape, true)?;
            all.into_iter().map(ExpertRows::split).collect()
        };
        let shape = [n_experts, hidden_size, width];
        let (experts, stacks) = weights.gated_experts(gate_up, &name("down_proj"), shape, true)?;
        let expert = |[gate_up, down]: [Linear; 2]| Expert { gate_up, down };
        Ok(Self {
            router,
            experts: experts.into_iter().map(expert).collect(),
            per_token: config.experts_per_token,
            limit: config.swiglu_limit,
            stacks,
        })
    }

    /// Exports the experts of the MLP `layer`.
    pub(super) fn export(&self, layer: &str, exports: &mut Exports) {
        let Self { router, experts, .. } = self;
        exports.floats(&format!("{layer}.router"), &router.weight, router.bias.as_ref());
        // Gate and up rows alternate in files.
        let gate_up = experts.iter().map(|expert| &expert.gate_up);
        exports.experts(&format!("{layer}.experts.gate_up_proj"), gate_up, RowOrder::InTurn);
        let down = experts.iter().map(|expert| &expert.down);
        exports.experts(&format!("{layer}.experts.down_proj"), down, RowOrder::Same);
    }
}
