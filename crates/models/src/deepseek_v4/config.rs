//! The configuration of DeepSeek-V4.

use std::collections::BTreeSet;

use kv_cubecl::sparse::Compression;

use super::Mode;
use crate::{
    fields,
    nn::RopeScaling,
    spec::{SharedEntries, SharedSelection, SparseLayer},
};

/// The tokens that a layer sees besides its sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// No others.
    Window,
    /// A selection of compressed entries, whose windows overlap.
    Selected,
    /// All compressed entries.
    All,
}

impl LayerKind {
    pub(super) const ALL: [Self; 3] = [Self::Window, Self::Selected, Self::All];

    /// Returns the name in `layer_types`.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Window => fields::SLIDING,
            Self::Selected => SELECTED,
            Self::All => ALL,
        }
    }
}

pub(super) const SELECTED: &str = "compressed_sparse_attention";
pub(super) const ALL: &str = "heavily_compressed_attention";
pub(super) const HASHED: &str = "hash_moe";
pub(super) const ROUTED: &str = "moe";

/// The configuration of a model, with all defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of a residual stream.
    pub hidden_size: usize,
    /// Width of an expert.
    pub intermediate_size: usize,
    /// The attention of the layers, first to last.
    pub layers: Vec<LayerKind>,
    /// Layers, counted from 0, that select experts by token id.
    pub hash_layers: BTreeSet<usize>,
    /// Query heads.
    pub n_heads: usize,
    /// Channels of a head, and of the row of a token.
    pub head_dim: usize,
    /// Channels at the end of a head that have rope.
    pub rotary_dim: usize,
    /// Channels of the compressed query.
    pub query_rank: usize,
    /// Groups of heads in the output projection.
    pub output_groups: usize,
    /// Channels of a group's compressed output.
    pub output_rank: usize,
    /// Recent tokens that a query sees themselves, including its own.
    pub sliding_window: usize,
    /// Tokens of an entry in layers with [`LayerKind::Selected`].
    pub selected_ratio: usize,
    /// Tokens of an entry in layers with [`LayerKind::All`].
    pub all_ratio: usize,
    /// Heads of an indexer.
    pub index_heads: usize,
    /// Channels of a head of an indexer.
    pub index_head_dim: usize,
    /// Entries that a token attends to in layers with [`LayerKind::Selected`].
    pub top_k: usize,
    /// Experts per layer.
    pub n_experts: usize,
    /// Experts that compute each token, besides the shared one.
    pub experts_per_token: usize,
    /// The factor of the weights of experts.
    pub routed_scale: f64,
    /// Bound of the values inside an expert.
    pub swiglu_limit: f64,
    /// Residual streams.
    pub streams: usize,
    /// Iterations that normalize the matrices between streams.
    pub sinkhorn_iterations: usize,
    /// The number added to the weights of streams.
    pub stream_epsilon: f64,
    /// The longest context.
    pub max_positions: usize,
    /// Epsilon of the norms.
    pub norm_epsilon: f64,
    /// Base of the rope frequencies of layers with [`LayerKind::Window`].
    pub rope_theta: f64,
    /// Scaling of these frequencies.
    pub rope_scaling: RopeScaling,
    /// Base of the rope frequencies of layers with entries.
    pub compressed_rope_theta: f64,
    /// Scaling of these frequencies.
    pub compressed_rope_scaling: RopeScaling,
    /// The rounding of attention's inputs.
    pub mode: Mode,
}

impl Config {
    /// Returns how a layer compresses tokens; `None` for a layer with a sliding window only.
    pub fn compression(&self, layer: usize) -> Option<Compression> {
        match self.layers[layer] {
            LayerKind::Window => None,
            LayerKind::Selected => Some(Compression::overlapping(self.selected_ratio)),
            LayerKind::All => Some(Compression::new(self.all_ratio)),
        }
    }

    /// Returns whether a layer selects entries.
    pub fn selects(&self, layer: usize) -> bool {
        self.layers[layer] == LayerKind::Selected
    }

    pub(super) fn sparse(&self, layer: usize) -> SparseLayer {
        let Some(compression) = self.compression(layer) else { return SparseLayer::window() };
        let entries = SharedEntries { owner: layer, compression };
        match self.selects(layer) {
            false => SparseLayer::all(entries),
            true => SparseLayer::selected(
                entries,
                SharedSelection {
                    owner: layer,
                    n_heads: self.index_heads,
                    head_dim: self.index_head_dim,
                    top_k: self.top_k,
                },
            ),
        }
    }

    pub(super) fn sizes(&self) -> [(&'static str, usize); 20] {
        [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("moe_intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.layers.len()),
            ("num_attention_heads", self.n_heads),
            ("head_dim", self.head_dim),
            ("qk_rope_head_dim", self.rotary_dim),
            ("q_lora_rank", self.query_rank),
            ("o_groups", self.output_groups),
            ("o_lora_rank", self.output_rank),
            ("sliding_window", self.sliding_window),
            ("index_n_heads", self.index_heads),
            ("index_head_dim", self.index_head_dim),
            ("index_topk", self.top_k),
            ("n_routed_experts", self.n_experts),
            ("num_experts_per_tok", self.experts_per_token),
            ("hc_mult", self.streams),
            ("hc_sinkhorn_iters", self.sinkhorn_iterations),
            ("max_position_embeddings", self.max_positions),
            ("num_key_value_heads", 1),
        ]
    }

    pub(super) fn rates(&self) -> [(&'static str, usize); 2] {
        [(SELECTED, self.selected_ratio), (ALL, self.all_ratio)]
    }
}
