//! The differences between families with the layers of this module.

use super::routing::Routing;
use crate::{checkpoint::Names, llama, stack::DecoderConfig};

/// The configuration of a family that has [`Layer`](super::Layer)s.
pub trait MoeConfig: DecoderConfig {
    /// The [`Decoder::name`](crate::Decoder::name) of the family, which checkpoints of training
    /// runs rely on.
    const NAME: &'static str;
    /// The names of the family's tensors.
    const NAMES: &'static Names;
    /// The names of the tensors of experts in Hugging Face files.
    const EXPERTS: ExpertNames;
    /// True if every head of queries and keys has a norm.
    const HAS_QK_NORMS: bool;

    /// Returns the configuration of everything except experts.
    fn base(&self) -> &llama::Config;

    /// Returns the experts of a layer, counted from 0; `None` for a layer with an MLP.
    fn experts(&self, layer: usize) -> Option<ExpertsConfig>;
}

/// The experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Experts.
    pub n_experts: usize,
    /// Width of an expert.
    pub width: usize,
    /// The selection of experts.
    pub routing: Routing,
    /// True if the selection has a bias for each expert.
    pub has_bias: bool,
    /// Width of the MLP that computes all tokens besides the experts, if there is one.
    pub shared: Option<usize>,
}

impl ExpertsConfig {
    /// Describes `n_experts` that are selected by their probabilities.
    pub const fn softmax(
        n_experts: usize,
        per_token: usize,
        width: usize,
        normalized: bool,
    ) -> Self {
        let routing = Routing::softmax(per_token, normalized);
        Self { n_experts, width, routing, has_bias: false, shared: None }
    }
}

/// The names of the tensors of a layer's experts, without `.weight`.
#[derive(Clone, Copy, Debug)]
pub struct ExpertNames {
    /// The router, such as `mlp.gate`.
    pub router: &'static str,
    /// The prefix of an expert's tensors before its number, such as `mlp.experts`.
    pub experts: &'static str,
    /// The gate, up and output projection of an expert, such as `gate_proj`.
    pub parts: [&'static str; 3],
    /// The bias of the selection, which is a whole name.
    pub bias: &'static str,
    /// The prefix of the MLP that computes all tokens.
    pub shared: &'static str,
}

impl ExpertNames {
    /// The names in files of Qwen and DeepSeek. The tables of GGUF names give them to the tensors
    /// of all GGUF files.
    pub(crate) const QWEN: Self = Self {
        router: "mlp.gate",
        experts: "mlp.experts",
        parts: ["gate_proj", "up_proj", "down_proj"],
        bias: "mlp.gate.e_score_correction_bias",
        shared: "mlp.shared_experts",
    };

    /// Returns the names of the projections of one expert.
    pub(super) fn of(&self, expert: usize) -> [String; 3] {
        self.parts.map(|part| format!("{}.{expert}.{part}", self.experts))
    }

    /// Returns the names of the projections of the MLP that computes all tokens.
    pub(super) fn shared(&self) -> [String; 3] {
        self.parts.map(|part| format!("{}.{part}", self.shared))
    }

    /// Returns the names of the projections of all experts together.
    pub(super) fn of_all(&self) -> [String; 3] {
        self.parts.map(|part| format!("{}.{part}", self.experts))
    }
}
