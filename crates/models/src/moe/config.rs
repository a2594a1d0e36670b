//! The differences between families with the layers of this module.

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsConfig {
    /// Experts.
    pub n_experts: usize,
    /// Experts that compute each token.
    pub per_token: usize,
    /// Width of an expert.
    pub width: usize,
    /// True if the weights of the selected experts are divided by their sum.
    pub normalized: bool,
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
}

impl ExpertNames {
    /// The names in files of Qwen. [`llama::GGUF`] gives them to the tensors of all GGUF files.
    pub(crate) const QWEN: Self = Self {
        router: "mlp.gate",
        experts: "mlp.experts",
        parts: ["gate_proj", "up_proj", "down_proj"],
    };

    /// Returns the names of the projections of one expert.
    pub(super) fn of(&self, expert: usize) -> [String; 3] {
        self.parts.map(|part| format!("{}.{expert}.{part}", self.experts))
    }

    /// Returns the names of the projections of all experts together.
    pub(super) fn of_all(&self) -> [String; 3] {
        self.parts.map(|part| format!("{}.{part}", self.experts))
    }
}
